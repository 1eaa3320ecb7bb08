//! Wanted against present: ordered operations. Pure.
