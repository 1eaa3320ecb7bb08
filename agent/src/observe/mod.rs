//! Counters, drop reasons, metrics and health endpoints.
