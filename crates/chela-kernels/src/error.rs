//! What can go wrong inside an operation.

/// The result of an operation.
pub type Result<T = ()> = core::result::Result<T, KernelError>;

/// An operation that was refused or failed. Nothing is padded or cut to make an operation fit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
    /// A buffer is shorter than the shape asks for.
    #[error("{op}: {what} needs {needs} numbers, the buffer has {has}")]
    Short {
        /// The operation.
        op: &'static str,
        /// Which of its buffers.
        what: &'static str,
        /// Numbers the shape asks for.
        needs: usize,
        /// Numbers the buffer has.
        has: usize,
    },
    /// Two sizes that must agree do not.
    #[error("{op}: {what} must be {expected}, got {got}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// Which size.
        what: &'static str,
        /// The size that was needed.
        expected: usize,
        /// The size that was given.
        got: usize,
    },
    /// An index points outside its table.
    #[error("{op}: {what} {index} is outside 0..{limit}")]
    Index {
        /// The operation.
        op: &'static str,
        /// What the index names.
        what: &'static str,
        /// The index.
        index: usize,
        /// One past the last valid index.
        limit: usize,
    },
    /// The bytes of a weight do not have the length its type and shape ask for.
    #[error("a {dtype} matrix of {rows} x {cols} takes {needs} bytes, got {has}")]
    WeightBytes {
        /// Name of the stored type.
        dtype: &'static str,
        /// Rows.
        rows: usize,
        /// Columns.
        cols: usize,
        /// Bytes it takes.
        needs: usize,
        /// Bytes given.
        has: usize,
    },
    /// A block-quantised row is not a whole number of blocks.
    #[error("a {dtype} row is made of blocks of {block} numbers; {cols} columns is not a multiple")]
    WeightBlock {
        /// Name of the stored type.
        dtype: &'static str,
        /// Numbers in a block.
        block: usize,
        /// Columns given.
        cols: usize,
    },
    /// A number that must be finite (or positive) is not.
    #[error("{op}: {what}")]
    NotFinite {
        /// The operation.
        op: &'static str,
        /// What was found.
        what: &'static str,
    },
    /// A tile panicked on a worker thread; the operation's outputs are unusable.
    #[error("a worker failed inside a parallel operation: {0}")]
    Worker(String),
}
