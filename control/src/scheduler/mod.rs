//! Queue, filters, scores and binding: a pure core and a thin runtime.
