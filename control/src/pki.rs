//! The cluster CA and the certificates issued from it.
