//! One file or folder per controller: a pure core and a thin runtime.
