//! Rotary position embedding (Su et al. 2021), half-split layout.
#![allow(unsafe_code)]

use super::simd::simd_fn;
use super::tiles::Shared;
use super::{Cpu, CpuBuf, equal, need};
use crate::error::Result;
use crate::ops::{Rope, RopeDirection};

simd_fn! {
    fn turn(head: &mut [f32], table: &[f32], sign: f32) {
        let half = table.len() / 2;
        let (cos, sin) = table.split_at(half);
        let (a, b) = head.split_at_mut(half);
        for (((a, b), cos), sin) in a.iter_mut().zip(b).zip(cos).zip(sin) {
            let (x, y, sin) = (*a, *b, sign * sin);
            *a = x * cos - y * sin;
            *b = y * cos + x * sin;
        }
    }
}

impl Cpu {
    pub(crate) fn rope_table_impl(
        &self,
        positions: &[u32],
        inv_freq: &[f32],
        scale: f32,
        table: &mut CpuBuf,
    ) -> Result {
        let half = inv_freq.len();
        need(
            "rope_table",
            "table",
            table.0.len(),
            positions.len() * 2 * half,
        )?;
        let table = Shared::new(&mut table.0);
        self.ranges(positions.len(), half as f64 * 40.0, |rows| {
            for t in rows {
                // SAFETY: tiles own disjoint rows.
                let row = unsafe { table.part(t * 2 * half..(t + 1) * 2 * half) };
                let (cos, sin) = row.split_at_mut(half);
                for ((c, s), f) in cos.iter_mut().zip(sin).zip(inv_freq) {
                    // The angle is rounded to f32 as in the models' own code, the functions are not.
                    let angle = f64::from(positions[t] as f32 * f);
                    *c = angle.cos() as f32 * scale;
                    *s = angle.sin() as f32 * scale;
                }
            }
        })
    }

    pub(crate) fn rope_impl(
        &self,
        x: &mut CpuBuf,
        table: &CpuBuf,
        rope: Rope,
        direction: RopeDirection,
    ) -> Result {
        let width = rope.heads * rope.head_dim;
        need("rope", "x", x.0.len(), rope.rows * width)?;
        need("rope", "table", table.0.len(), rope.rows * 2 * rope.half)?;
        if 2 * rope.half > rope.head_dim {
            equal(
                "rope",
                "turned numbers of a head (at most)",
                rope.head_dim,
                2 * rope.half,
            )?;
        }
        let sign = if direction == RopeDirection::Forward {
            1.0
        } else {
            -1.0
        };
        let x = Shared::new(&mut x.0);
        self.ranges(rope.rows, width as f64 * 0.3, |rows| {
            for t in rows {
                let angles = &table.0[t * 2 * rope.half..(t + 1) * 2 * rope.half];
                // SAFETY: tiles own disjoint rows.
                let row = unsafe { x.part(t * width..(t + 1) * width) };
                for head in row.chunks_exact_mut(rope.head_dim.max(1)) {
                    turn(&mut head[..2 * rope.half], angles, sign);
                }
            }
        })
    }
}
