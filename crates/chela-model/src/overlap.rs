//! No byte of a file may belong to two tensors.

use std::ops::Range;
use std::path::Path;

use crate::error::{ModelError, Result};

/// Refuses a file two of whose tensors share bytes, naming both. Empty tensors lie anywhere.
pub(crate) fn refuse_overlaps<'a>(
    path: &Path,
    tensors: impl Iterator<Item = (&'a str, Range<u64>)>,
) -> Result<()> {
    let mut places: Vec<_> = tensors.filter(|(_, bytes)| !bytes.is_empty()).collect();
    places.sort_unstable_by_key(|(_, bytes)| bytes.start);
    for pair in places.windows(2) {
        if let [(first, before), (second, after)] = pair
            && after.start < before.end
        {
            let reason = format!(
                "starts at byte {}, within tensor {first}, which ends at {}",
                after.start, before.end
            );
            return Err(ModelError::tensor(path, second, reason));
        }
    }
    Ok(())
}
