//! TensorBoard's event files, written by hand: TFRecord framing (length, masked CRC-32C, bytes, masked CRC-32C) around `Event` messages
//! of protocol buffers. Sources: tensorflow/core/lib/io/record_writer.h, tensorflow/core/util/event.proto and
//! tensorflow/core/framework/summary.proto; golden/tfevents.py holds the result against TensorBoard's own writer.

use std::collections::BTreeSet;

/// The table of CRC-32C (Castagnoli), reflected.
const CASTAGNOLI: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = (crc >> 1) ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

/// CRC-32C, rotated and shifted so that the sum of a text that holds sums is none of them.
fn masked(bytes: &[u8]) -> u32 {
    let crc = bytes.iter().fold(u32::MAX, |crc, byte| {
        CASTAGNOLI[((crc ^ u32::from(*byte)) & 0xff) as usize] ^ (crc >> 8)
    });
    (!crc).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// One record of a file.
fn record(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    [
        &length[..],
        &masked(&length).to_le_bytes(),
        data,
        &masked(data).to_le_bytes(),
    ]
    .concat()
}

fn varint(out: &mut Vec<u8>, mut x: u64) {
    while x >= 0x80 {
        out.push(x as u8 | 0x80);
        x >>= 7;
    }
    out.push(x as u8);
}

/// A field of bytes, a text or a message.
fn bytes(out: &mut Vec<u8>, field: u8, data: &[u8]) {
    out.push(field << 3 | 2);
    varint(out, data.len() as u64);
    out.extend_from_slice(data);
}

/// `Event`: wall_time = 1, step = 2, file_version = 3, summary = 5. What is zero is left out, as protocol buffers do.
fn event(wall_time: f64, step: u64, (field, body): (u8, &[u8])) -> Vec<u8> {
    let mut out = Vec::new();
    if wall_time != 0.0 {
        out.push(1 << 3 | 1);
        out.extend_from_slice(&wall_time.to_le_bytes());
    }
    if step != 0 {
        out.push(2 << 3);
        varint(&mut out, step);
    }
    bytes(&mut out, field, body);
    record(&out)
}

/// What a file begins with.
pub fn head(wall_time: f64) -> Vec<u8> {
    event(wall_time, 0, (3, b"brain.Event:2"))
}

/// The figures of one step, each by its tag; `Summary.value` = 1, in it tag = 1, simple_value = 2. `wall_time` in seconds since 1970.
pub fn scalars(wall_time: f64, step: u64, figures: &[(String, f64)]) -> Vec<u8> {
    let mut summary = Vec::new();
    for (tag, x) in figures {
        let mut value = Vec::new();
        bytes(&mut value, 1, tag.as_bytes());
        value.push(2 << 3 | 5);
        value.extend_from_slice(&(*x as f32).to_le_bytes());
        bytes(&mut summary, 1, &value);
    }
    event(wall_time, step, (5, &summary))
}

/// The steps that a file holds figures of, and how many of its bytes are whole records: a crash may leave part of one.
pub fn steps(file: &[u8]) -> (BTreeSet<u64>, usize) {
    let (mut steps, mut at) = (BTreeSet::new(), 0);
    while let Some(data) = whole(&file[at..]) {
        steps.extend(step(data));
        at += data.len() + 16;
    }
    (steps, at)
}

/// The data of the record that stands first.
fn whole(file: &[u8]) -> Option<&[u8]> {
    let sum = |at: usize| Some(u32::from_le_bytes(file.get(at..at + 4)?.try_into().ok()?));
    let length = u64::from_le_bytes(file.get(..8)?.try_into().ok()?);
    let end = usize::try_from(length).ok()?.checked_add(12)?;
    let data = file.get(12..end)?;
    let right = sum(8)? == masked(&file[..8]) && sum(end)? == masked(data);
    right.then_some(data)
}

/// The step of an event as written above: wall_time comes first, then the step, and the first event has none.
fn step(event: &[u8]) -> Option<u64> {
    let rest = match event.first()? {
        9 => event.get(9..)?,
        _ => event,
    };
    let number = rest.strip_prefix(&[2 << 3])?;
    let end = number.iter().position(|b| b & 0x80 == 0)?;
    let parts = number[..=end].iter().rev();
    Some(parts.fold(0, |x, b| x << 7 | u64::from(b & 0x7f)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    #[test]
    fn the_checksum_is_castagnolis() {
        // RFC 3720, B.4: 32 zeros and 32 ones; then masked.
        let of = |crc: u32| crc.rotate_right(15).wrapping_add(0xa282_ead8);
        assert_eq!(masked(&[0; 32]), of(0x8a91_36aa));
        assert_eq!(masked(&[0xff; 32]), of(0x62a8_ab43));
        assert_eq!(masked(b"123456789"), of(0xe306_9283));
    }

    #[test]
    fn a_file_has_the_bytes_that_tensorboards_own_writer_gives() {
        let golden = include_str!("../../../../golden/tfevents.json");
        let golden: Value = serde_json::from_str(golden).unwrap();
        let events = golden["events"].as_array().unwrap();
        let mut file = head(golden["wall_time"].as_f64().unwrap());
        for event in events {
            let figures: Vec<(String, f64)> = event["scalars"]
                .as_array()
                .unwrap()
                .iter()
                .map(|pair| {
                    let x = pair[1].as_f64().unwrap();
                    (pair[0].as_str().unwrap().to_owned(), x)
                })
                .collect();
            let step = event["step"].as_u64().unwrap();
            let time = event["wall_time"].as_f64().unwrap();
            file.extend(scalars(time, step, &figures));
        }
        let hex: String = file.iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(hex, golden["file"].as_str().unwrap());
        let (found, whole) = steps(&file);
        let wanted: BTreeSet<u64> = events.iter().map(|e| e["step"].as_u64().unwrap()).collect();
        assert_eq!((found, whole), (wanted, file.len()));
    }

    #[test]
    fn a_torn_or_damaged_end_is_left_out() {
        let mut file = head(1.5);
        for step in [1, 200, 70_000] {
            file.extend(scalars(2.5, step, &[("a".to_owned(), 0.5)]));
        }
        let first = head(1.5).len();
        let one = scalars(2.5, 1, &[("a".to_owned(), 0.5)]).len();
        for cut in 0..file.len() {
            let (found, whole) = steps(&file[..cut]);
            assert!(whole <= cut);
            assert_eq!(found.contains(&1), cut >= first + one, "{cut}");
        }
        let mut damaged = file.clone();
        damaged[first + 20] ^= 1;
        assert_eq!(steps(&damaged), (BTreeSet::new(), first));
        assert_eq!(steps(&file).0, BTreeSet::from([1, 200, 70_000]));
    }
}
