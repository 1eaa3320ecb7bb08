//! The node feed server (tonic).
