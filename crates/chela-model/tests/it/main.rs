//! The crate as others use it: tiny models of every family, broken ones, and the real starter.

#[cfg(test)]
mod broken;
#[cfg(test)]
mod headers;
#[cfg(test)]
mod hostile;
#[cfg(test)]
mod real;
#[cfg(test)]
mod tiny;
