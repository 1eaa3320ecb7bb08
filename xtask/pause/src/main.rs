//! First process of a pod's sandbox: holds the namespaces, reaps orphans, ends on SIGTERM or SIGINT.

use nix::sys::signal::{SigSet, Signal};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

fn main() {
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGCHLD] {
        signals.add(signal);
    }
    // The kernel drops signals that process 1 neither handles nor blocks: block them, then wait for them.
    if signals.thread_block().is_err() {
        std::process::exit(1);
    }
    loop {
        match signals.wait() {
            Ok(Signal::SIGTERM | Signal::SIGINT) => return,
            Ok(_) => reap(),
            Err(_) => {}
        }
    }
}

fn reap() {
    let any = Pid::from_raw(-1);
    while matches!(waitpid(any, Some(WaitPidFlag::WNOHANG)), Ok(s) if s != WaitStatus::StillAlive) {
    }
}
