//! Schemas of the built-in kinds: field names, types, protobuf tags, list kinds and merge keys.
