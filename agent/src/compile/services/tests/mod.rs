//! Examples for people, and histories against a model.

mod examples;
mod histories;
mod model;
mod world;
