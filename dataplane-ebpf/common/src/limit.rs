//! How many ICMP messages of its own a node sends: a token bucket, as the kernel has one for those of its stack
//! (`net.ipv4.icmp_msgs_per_sec`, `icmp_msgs_burst`; RFC 1812 section 4.3.2.8, RFC 4443 section 2.4 (f)).

/// Messages in a second. Each CPU has a bucket of its own: programs of two CPUs never wait for one another.
pub const MESSAGES_PER_S: u32 = 1_000;

/// Messages at once, after a quiet time.
pub const MESSAGES_BURST: u32 = 100;

/// Tokens in a second, and at once after a quiet time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rate {
    pub per_s: u32,
    pub burst: u32,
}

/// Of ICMP messages.
pub const MESSAGES: Rate = Rate {
    per_s: MESSAGES_PER_S,
    burst: MESSAGES_BURST,
};

/// A bucket of tokens, counted in thousandths so that a millisecond adds a whole number. All zero is a full bucket.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Bucket {
    /// Thousandths of tokens that are gone.
    pub taken: u32,
    /// Milliseconds of the monotonic clock, modulo 2^32, at which `taken` was right.
    pub at_ms: u32,
}

impl Bucket {
    /// Takes a token for an ICMP message. False when there is none: it is not sent.
    #[inline(always)]
    pub fn take(&mut self, now_ms: u32) -> bool {
        self.take_of(MESSAGES, now_ms)
    }

    /// Takes a token of a bucket that fills at `rate`. False when there is none.
    #[inline(always)]
    pub fn take_of(&mut self, rate: Rate, now_ms: u32) -> bool {
        const TOKEN: u32 = 1_000;
        let full = rate.burst * TOKEN;
        let passed_ms = now_ms.wrapping_sub(self.at_ms);
        let back = if passed_ms < full / rate.per_s {
            passed_ms * rate.per_s
        } else {
            full
        };
        let taken = self.taken.saturating_sub(back);
        self.at_ms = now_ms;
        let granted = taken + TOKEN <= full;
        self.taken = if granted { taken + TOKEN } else { taken };
        granted
    }
}
