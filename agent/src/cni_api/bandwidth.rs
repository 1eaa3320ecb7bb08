//! How much a pod may send and receive: the CNI capability `bandwidth`. Pure.

use serde::{Deserialize, Serialize};

use super::{CniError, Code};
use crate::netlink::shape::Bucket;

/// A bucket holds at least so many milliseconds of its rate where the runtime names no burst.
const DEFAULT_BURST_MS: u64 = 100;

/// Limits as libcni writes them (CNI conventions, «bandwidth»): bits per second, and bits. Zero: no limit. Ingress is what
/// the pod receives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Bandwidth {
    pub ingress_rate: u64,
    pub ingress_burst: u64,
    pub egress_rate: u64,
    pub egress_burst: u64,
}

impl Bandwidth {
    /// Refuses bursts without a rate.
    pub(super) fn check(self) -> Result<Self, CniError> {
        for (what, rate, burst) in [
            ("ingress", self.ingress_rate, self.ingress_burst),
            ("egress", self.egress_rate, self.egress_burst),
        ] {
            if rate == 0 && burst != 0 {
                let message = format!(
                    "runtimeConfig.bandwidth has {what}Burst {burst} and no {what}Rate; name both, or neither"
                );
                return Err(CniError::new(Code::InvalidConfig, message));
            }
        }
        Ok(self)
    }

    /// For what the pod receives, if that is limited.
    pub(super) fn ingress(&self, mtu: u32) -> Option<Bucket> {
        bucket(self.ingress_rate, self.ingress_burst, mtu)
    }

    /// For what the pod sends, if that is limited.
    pub(super) fn egress(&self, mtu: u32) -> Option<Bucket> {
        bucket(self.egress_rate, self.egress_burst, mtu)
    }
}

fn bucket(rate: u64, burst: u64, mtu: u32) -> Option<Bucket> {
    const ETHERNET_HEADER: u32 = 14;
    if rate == 0 {
        return None;
    }
    let rate = (rate / 8).max(1);
    let burst = match burst / 8 {
        0 => rate.saturating_mul(DEFAULT_BURST_MS) / 1000,
        bytes => bytes,
    };
    // A bucket that holds no whole packet lets none pass.
    let least = mtu.saturating_add(ETHERNET_HEADER);
    let burst = u32::try_from(burst).unwrap_or(u32::MAX).max(least);
    Some(Bucket { rate, burst })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_become_bytes_and_a_burst_holds_a_packet() {
        let given: Bandwidth = serde_json::from_str(
            r#"{"ingressRate":80000000,"ingressBurst":2147483647,"egressRate":8000,"egressBurst":8}"#,
        )
        .unwrap();
        let given = given.check().unwrap();
        let bucket = |rate, burst| Some(Bucket { rate, burst });
        assert_eq!(given.ingress(1500), bucket(10_000_000, 268_435_455));
        assert_eq!(given.egress(1500), bucket(1_000, 1_514));
        let plain = Bandwidth {
            egress_rate: 1 << 40,
            ..Bandwidth::default()
        };
        assert_eq!(plain.ingress(1500), None);
        assert_eq!(plain.egress(1500).unwrap().rate, 1 << 37);
        let burst = Bandwidth {
            ingress_burst: 9,
            ..Bandwidth::default()
        };
        assert_eq!(burst.check().unwrap_err().code, Code::InvalidConfig);
    }
}
