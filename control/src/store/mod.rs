//! Ordered, watchable key-value store: the trait and its embedded implementation (redb).
