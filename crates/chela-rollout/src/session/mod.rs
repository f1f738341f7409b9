//! Which session a request belongs to, which turn it continues, what kind it is: plain functions, no clock, no store.

pub mod follow;
pub mod kind;
pub mod live;
pub mod normal;
