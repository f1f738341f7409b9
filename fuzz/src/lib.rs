//! What must hold of every header that is accepted.

use chela_model::testing::Place;

/// Every tensor lies within a file of `len` bytes, and no two share a byte.
pub fn check(tensors: &[Place], len: usize) {
    let mut places: Vec<_> = tensors.iter().map(|(_, place)| place.clone()).collect();
    places.retain(|place| !place.is_empty());
    places.sort_by_key(|place| place.start);
    assert!(places.iter().all(|place| place.end <= len as u64));
    assert!(places.windows(2).all(|pair| pair[0].end <= pair[1].start));
}
