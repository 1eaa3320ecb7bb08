//! Admission: what a namespace's policies fill into new objects, refuse about them and charge for them. Pure: the write
//! path reads the policies, asks here, and puts what is charged into the transaction of the write.

pub mod limits;
pub mod pod_security;
pub mod quota;
pub mod resources;
pub mod usage;
