//! The decisions over ordinary collections: histories against a naive model, and the arithmetic against recomputation.

mod arithmetic;
mod collect;
mod echo;
mod entries;
mod fragments;
mod histories;
mod icmp;
mod limit;
mod overlay;
mod own;
mod paths;
mod policy;
mod policy_paths;
mod refuse;
mod sctp;
mod sockets;
mod tables;
mod wire;
