//! Cluster DNS server of this node.
