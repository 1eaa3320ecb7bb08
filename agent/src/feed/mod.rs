//! Node feed client: keeps the desired state current.
