//! Map layouts and packet decisions, shared by the eBPF programs and the host.
//!
//! Pure and `no_std`: no I/O, no clock, no allocation. Nothing here names aya.
#![cfg_attr(not(any(test, feature = "std")), no_std)]
