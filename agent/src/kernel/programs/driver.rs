//! The program at the drivers of uplinks (XDP). Native only: in generic mode it would cost what it is to save.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use aya::programs::{Program as AyaProgram, TestRun as _, TestRunOptions};

use super::{Programs, TestRun};
use crate::kernel::link::{attach_to_driver, pin, update_link};
use crate::kernel::table::{detach_link, open_pin};
use crate::kernel::{KernelError, ProgramSize};

/// Name in the object, in pins and in `bpftool prog`.
const NAME: &str = "at_driver";

/// Why an uplink's driver does not run the program. The link's ingress hook does the same work.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    #[error("find the interface: {0}")]
    Interface(io::Error),
    #[error("load the eBPF program {NAME}: {0}")]
    Load(Box<dyn std::error::Error + Send + Sync>),
    #[error("the driver does not take the program: {0}")]
    Attach(io::Error),
    #[error(transparent)]
    Map(#[from] KernelError),
}

impl Programs {
    /// Gives the driver of an uplink its program, or leads the one that is there to this agent's. On failure none is
    /// left. One of another version stays until it is taken over.
    pub(in crate::kernel) fn attach_driver(&mut self, name: &str) -> Result<(), DriverError> {
        if self.is_taking_over() {
            return Ok(());
        }
        let ifindex = nix::net::if_::if_nametoindex(name)
            .map_err(|errno| DriverError::Interface(errno.into()))?;
        let program = self.load_driver().map_err(DriverError::Load)?;
        let path = self.pins.driver(ifindex);
        let attached = attach(&program, ifindex, &path);
        if let Err(source) = attached {
            self.detach_driver(ifindex)?;
            return Err(DriverError::Attach(source));
        }
        Ok(self
            .drivers
            .put(&ifindex, &1)
            .map_err(failed("enter the link in"))?)
    }

    /// Takes the program from every driver but those of these links.
    pub(in crate::kernel) fn keep_drivers(&mut self, kept: &[u32]) -> Result<(), KernelError> {
        for ifindex in self.pins.drivers().unwrap_or_default() {
            if !kept.contains(&ifindex) {
                self.detach_driver(ifindex)?;
            }
        }
        Ok(())
    }

    fn detach_driver(&mut self, ifindex: u32) -> Result<(), KernelError> {
        // First of all, so that no other driver hands frames to it.
        self.drivers
            .remove(&ifindex)
            .map_err(failed("remove the link from"))?;
        let path = self.pins.driver(ifindex);
        // A link whose interface has gone is detached already, and says so.
        let _ = detach_link(&path);
        super::remove_if_present(&path)
    }

    /// Runs the program on a frame without sending it. The frame counts as received on `ifindex`. Linux 5.15 or newer.
    pub(in crate::kernel) fn test_run_driver(
        &mut self,
        frame: &[u8],
        ifindex: u32,
        repeat: u32,
    ) -> Result<TestRun, KernelError> {
        /// Offsets in the kernel's `xdp_md`, and its size.
        const DATA_END: usize = 4;
        const IFINDEX: usize = 12;
        const CONTEXT: usize = 24;
        const HEADROOM: usize = 256;
        let failed = |source| KernelError::Program {
            program: NAME,
            source,
        };
        self.load_driver().map_err(failed)?;
        let mut context = [0u8; CONTEXT];
        let length = u32::try_from(frame.len()).unwrap_or(u32::MAX);
        context[DATA_END..DATA_END + 4].copy_from_slice(&length.to_ne_bytes());
        context[IFINDEX..IFINDEX + 4].copy_from_slice(&ifindex.to_ne_bytes());
        let mut output = vec![0u8; frame.len() + HEADROOM];
        let mut options = TestRunOptions::new();
        options.data_in = Some(frame);
        options.data_out = Some(&mut output);
        options.ctx_in = Some(&context);
        options.repeat = repeat.max(1);
        let Some(AyaProgram::Xdp(program)) = self.ebpf.program_mut(NAME) else {
            return Err(failed("the object has no such program".into()));
        };
        let result = program.test_run(options).map_err(|e| failed(e.into()))?;
        output.truncate(result.data_size_out as usize);
        Ok(TestRun {
            verdict: result.return_value.cast_signed(),
            packet: output,
            duration: result.duration,
        })
    }

    pub(in crate::kernel) fn driver_program_size(&self) -> Option<(&'static str, ProgramSize)> {
        let Some(AyaProgram::Xdp(program)) = self.ebpf.program(NAME) else {
            return None;
        };
        let info = program.info().ok()?;
        Some((NAME, super::size_of_program(&info)))
    }

    fn load_driver(&mut self) -> Result<OwnedFd, Box<dyn std::error::Error + Send + Sync>> {
        let Some(AyaProgram::Xdp(program)) = self.ebpf.program_mut(NAME) else {
            return Err("the object has no such program".into());
        };
        if program.fd().is_err() {
            program.load()?;
        }
        Ok(program.fd()?.as_fd().try_clone_to_owned()?)
    }
}

fn failed(attempted: &'static str) -> impl FnOnce(io::Error) -> KernelError {
    move |source| KernelError::Map {
        attempted,
        map: "driver_links",
        source,
    }
}

fn attach(program: &OwnedFd, ifindex: u32, path: &Path) -> io::Result<()> {
    if let Ok(link) = open_pin(path)
        && update_link(link.as_fd(), program.as_fd()).is_ok()
    {
        return Ok(());
    }
    // Of an interface that has gone, whose number came back.
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let link = attach_to_driver(program.as_fd(), ifindex)?;
    pin(link.as_fd(), path)
}

/// The pin of a driver's link. No interface's number starts like this.
pub(super) fn pin_name(ifindex: u32) -> PathBuf {
    PathBuf::from(format!("driver-{ifindex}"))
}

/// The interface of a pin with this name.
pub(super) fn pinned_ifindex(name: &str) -> Option<u32> {
    name.strip_prefix("driver-")?.parse().ok()
}
