//! SHA-256 over an adapter as it is in memory: names, shapes, scale and values.

use crate::{
    adapter::{Lora, Side, Target, bytes_of},
    error::kernel,
};
use chela_core::EngineError;
use chela_kernels::Kernels;
use sha2::{Digest, Sha256};

/// A hash that grows by one map after the other, so that an adapter is hashed while it is read and its numbers are still near.
#[derive(Default)]
pub struct AdapterDigest {
    hash: Sha256,
    /// One buffer for all: a publish waits for this, and fresh memory costs as much as the hash.
    values: Vec<f32>,
    begun: bool,
}

impl AdapterDigest {
    /// Adds a map of an adapter of that rank and scale, in the order of [`crate::adapter::Adapter::entries`].
    pub fn add<K: Kernels>(
        &mut self,
        k: &K,
        (rank, scale): (usize, f32),
        (layer, target): (usize, Target),
        lora: &Lora<K::Buf>,
    ) -> Result<(), EngineError> {
        if !self.begun {
            self.begun = true;
            self.hash.update(rank.to_le_bytes());
            self.hash.update(scale.to_le_bytes());
        }
        self.hash.update(target.tensor(layer, Side::A).as_bytes());
        self.hash.update(lora.out.to_le_bytes());
        self.hash.update(lora.input.to_le_bytes());
        self.buffer(k, &lora.a)?;
        self.buffer(k, &lora.b)
    }

    fn buffer<K: Kernels>(&mut self, k: &K, buf: &K::Buf) -> Result<(), EngineError> {
        self.values.resize(k.len(buf), 0.0);
        k.read(buf, 0, &mut self.values).map_err(kernel)?;
        if cfg!(target_endian = "little") {
            self.hash.update(bytemuck::cast_slice(&self.values));
        } else {
            self.hash.update(bytes_of(&self.values));
        }
        Ok(())
    }

    /// In hexadecimal digits.
    pub fn finish(self) -> String {
        let bytes = self.hash.finalize();
        bytes.iter().map(|b| format!("{b:02x}")).collect()
    }
}
