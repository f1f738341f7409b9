//! The value head: what a state is worth, as a linear map of the final normed hidden state, V = w · h + b. It is the learner's alone: nothing
//! that is served reads it, and no hash of weights has it in.

use crate::{
    adapter::TensorFile,
    error::{kernel, weights},
};
use chela_core::EngineError;
use chela_kernels::{Acc, Kernels, Mat, MatMut, Product};
use chela_model::write_vectors_f32;
use std::path::Path;

/// Its file, beside those of the weights.
const FILE: &str = "value_head.safetensors";

/// w and b, or what is kept of the same shapes.
pub struct ValueHead<B> {
    /// `[H]`
    weight: B,
    /// `[1]`
    bias: B,
    hidden: usize,
}

impl<B> ValueHead<B> {
    /// All zero: every state is worth nothing yet, and nothing flows back from it.
    pub fn zeros<K: Kernels<Buf = B>>(k: &K, hidden: usize) -> Result<Self, EngineError> {
        Ok(Self {
            weight: k.zeros(hidden).map_err(kernel)?,
            bias: k.zeros(1).map_err(kernel)?,
            hidden,
        })
    }

    /// The one of a checkpoint; zeros where it has none.
    pub fn read<K: Kernels<Buf = B>>(
        k: &K,
        hidden: usize,
        dir: &Path,
    ) -> Result<Self, EngineError> {
        let mut head = Self::zeros(k, hidden)?;
        if !Self::is_in(dir) {
            return Ok(head);
        }
        let path = dir.join(FILE);
        let refuse = |why| weights(format!("{}: {why}", path.display()));
        let mut file = TensorFile::open(&path).map_err(refuse)?;
        let weight = file.values("weight", &[hidden]).map_err(refuse)?;
        let bias = file.values("bias", &[1]).map_err(refuse)?;
        k.write(&mut head.weight, 0, &weight).map_err(kernel)?;
        k.write(&mut head.bias, 0, &bias).map_err(kernel)?;
        Ok(head)
    }

    /// Whether a checkpoint has one.
    pub(super) fn is_in(dir: &Path) -> bool {
        dir.join(FILE).exists()
    }

    /// Writes it into an existing folder and syncs it.
    pub(super) fn write<K: Kernels<Buf = B>>(&self, k: &K, dir: &Path) -> Result<(), EngineError> {
        let table = [("weight".to_owned(), self.hidden), ("bias".to_owned(), 1)];
        let both = self.buffers();
        let mut values = |i: usize| k.download(both[i]).map_err(|e| e.to_string());
        write_vectors_f32(&dir.join(FILE), &table, &mut values)
            .map_err(|e| EngineError::Io(e.to_string()))
    }

    /// Weight, then bias.
    pub(super) fn buffers(&self) -> [&B; 2] {
        [&self.weight, &self.bias]
    }

    /// As [`ValueHead::buffers`].
    pub(super) fn buffers_mut(&mut self) -> [&mut B; 2] {
        [&mut self.weight, &mut self.bias]
    }

    /// V `[R]` of normed hidden rows `[R, H]`. A row's value does not depend on how many rows there are.
    pub(super) fn values<K: Kernels<Buf = B>>(
        &self,
        k: &K,
        hidden: Mat<'_, B>,
    ) -> Result<Vec<f32>, EngineError> {
        let rows = hidden.rows;
        let mut values = k.zeros(rows).map_err(kernel)?;
        let weight = Mat::new(&self.weight, 1, self.hidden);
        let to = MatMut::new(&mut values, 1, rows);
        k.matmul(Product::NT, 1.0, (weight, hidden), to, Acc::Set)
            .map_err(kernel)?;
        let bias = k.download(&self.bias).map_err(kernel)?;
        let values = k.download(&values).map_err(kernel)?;
        Ok(values.into_iter().map(|v| v + bias[0]).collect())
    }

    /// From the derivative `[R]` by each row's value: adds w's and b's to `grads`, and the rows' to `d_hidden [R, H]`.
    pub(super) fn backward<K: Kernels<Buf = B>>(
        &self,
        k: &K,
        hidden: Mat<'_, B>,
        d_values: &[f32],
        d_hidden: &mut B,
        grads: &mut Self,
    ) -> Result<(), EngineError> {
        let rows = hidden.rows;
        let d = k.upload(d_values).map_err(kernel)?;
        let ones = k.upload(&vec![1.0; rows]).map_err(kernel)?;
        let (row, column) = (Mat::new(&d, 1, rows), Mat::new(&d, rows, 1));
        let to = MatMut::new(&mut grads.weight, 1, self.hidden);
        k.matmul(Product::NN, 1.0, (row, hidden), to, Acc::Add)
            .map_err(kernel)?;
        let to = MatMut::new(&mut grads.bias, 1, 1);
        let ones = Mat::new(&ones, rows, 1);
        k.matmul(Product::NN, 1.0, (row, ones), to, Acc::Add)
            .map_err(kernel)?;
        let weight = Mat::new(&self.weight, 1, self.hidden);
        let to = MatMut::new(d_hidden, rows, self.hidden);
        k.matmul(Product::NN, 1.0, (column, weight), to, Acc::Add)
            .map_err(kernel)
    }
}
