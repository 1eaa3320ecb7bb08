//! Kubernetes REST over the store: discovery, decoding, validation, patch, watch, authentication.
