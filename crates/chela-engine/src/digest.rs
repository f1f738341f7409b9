//! SHA-256 over an adapter or a whole model as it is in memory: names, shapes, scale and values.

use crate::{
    adapter::{Lora, Side, Target, bytes_of},
    error::kernel,
    weights::BaseWeights,
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
        add(&mut self.hash, &self.values);
        Ok(())
    }

    /// In hexadecimal digits.
    pub fn finish(self) -> String {
        hexadecimal(self.hash)
    }
}

/// The hash of a whole model, in hexadecimal digits; `rest` is called between parts of the work.
pub fn of_model<K: Kernels>(
    k: &K,
    model: &BaseWeights<K>,
    rest: &mut dyn FnMut(),
) -> Result<String, EngineError> {
    let mut hash = Sha256::new();
    for name in model.config.tensor_names() {
        hash.update(name.to_string().as_bytes());
        for size in model.config.shape(name).unwrap_or_default() {
            hash.update(size.to_le_bytes());
        }
        model.read(k, name, &mut |values| {
            add(&mut hash, values);
            rest();
        })?;
    }
    Ok(hexadecimal(hash))
}

fn add(hash: &mut Sha256, values: &[f32]) {
    if cfg!(target_endian = "little") {
        hash.update(bytemuck::cast_slice(values));
    } else {
        hash.update(bytes_of(values));
    }
}

fn hexadecimal(hash: Sha256) -> String {
    let bytes = hash.finalize();
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
