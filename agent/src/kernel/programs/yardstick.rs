//! Programs that cost what the kernel itself costs. Loaded on first use, and for measurements only.

use aya::programs::SchedClassifier;

use super::{KernelError, Links, Programs, TestRun, run_on};

/// What a yardstick does with a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Yardstick {
    Nothing,
    /// Reads addresses and ports.
    ReadV4,
    ReadV6,
    /// Reads them, and looks the flow up once. Drops a packet that has none.
    FindV4,
    FindV6,
}

impl Yardstick {
    /// Name in the object.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Nothing => "yard_empty",
            Self::ReadV4 => "yard_read_v4",
            Self::ReadV6 => "yard_read_v6",
            Self::FindV4 => "yard_find_v4",
            Self::FindV6 => "yard_find_v6",
        }
    }
}

impl Programs {
    pub(in crate::kernel) fn test_run_yardstick(
        &mut self,
        yardstick: Yardstick,
        packet: &[u8],
        ifindex: u32,
    ) -> Result<TestRun, KernelError> {
        let mut run = || -> Result<TestRun, aya::programs::ProgramError> {
            let found = self.ebpf.program_mut(yardstick.name());
            let program: &mut SchedClassifier = found
                .ok_or(aya::programs::ProgramError::NotLoaded)?
                .try_into()?;
            if program.fd().is_err() {
                program.load()?;
            }
            run_on(program, packet, Links::at(ifindex), 1)
        };
        run().map_err(|source| KernelError::Program {
            program: yardstick.name(),
            source: source.into(),
        })
    }
}
