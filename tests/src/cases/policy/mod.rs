//! Policy cases.
