//! The operations on numbers, and their CPU implementation; all unsafe code of the project.
