//! The local socket that `weir-cni` calls, and IPAM.
