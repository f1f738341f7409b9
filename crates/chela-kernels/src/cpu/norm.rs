//! Root-mean-square norm over rows, and its gradient.
#![allow(unsafe_code)]

use super::simd::{LANES, dot_lanes, fold, simd_fn};
use super::tiles::Shared;
use super::{Cpu, CpuBuf, need};
use crate::error::Result;
use crate::ops::{Acc, Norm, NormGrad};

simd_fn! {
    fn forward_row(x: &[f32], w: &[f32], eps: f32, plus: f32, y: &mut [f32]) {
        let r = 1.0 / (dot_lanes::<FMA>(x, x) / x.len() as f32 + eps).sqrt();
        for ((y, x), w) in y.iter_mut().zip(x).zip(w) {
            *y = x * r * (w + plus);
        }
    }
}

simd_fn! {
    // With r = 1 / rms: dx_i = r g_i - x_i r³ / width * Σ_j g_j x_j, where g = dy * w.
    fn backward_row(
        x: &[f32], w: &[f32], dy: &[f32], constants: (f32, f32), dx: &mut [f32], add: bool,
    ) -> f32 {
        let (eps, plus) = constants;
        let width = x.len() as f32;
        let r = 1.0 / (dot_lanes::<FMA>(x, x) / width + eps).sqrt();
        let mut acc = [0.0; LANES];
        let whole = x.len() / LANES * LANES;
        for i in (0..whole).step_by(LANES) {
            let (x, w, dy) = (&x[i..i + LANES], &w[i..i + LANES], &dy[i..i + LANES]);
            for l in 0..LANES {
                acc[l] += dy[l] * (w[l] + plus) * x[l];
            }
        }
        let mut sum = fold(acc);
        for i in whole..x.len() {
            sum += dy[i] * (w[i] + plus) * x[i];
        }
        let factor = sum * r * r * r / width;
        for (((dx, x), w), dy) in dx.iter_mut().zip(x).zip(w).zip(dy) {
            let d = r * dy * (w + plus) - x * factor;
            *dx = if add { *dx + d } else { d };
        }
        r
    }
}

simd_fn! {
    fn weight_row(x: &[f32], dy: &[f32], r: f32, dw: &mut [f32]) {
        for ((dw, x), dy) in dw.iter_mut().zip(x).zip(dy) {
            *dw += dy * x * r;
        }
    }
}

fn check(op: &'static str, bufs: &[(&'static str, usize)], w: usize, norm: Norm) -> Result {
    need(op, "w", w, norm.width)?;
    bufs.iter()
        .try_for_each(|(what, len)| need(op, what, *len, norm.rows * norm.width))
}

impl Cpu {
    pub(crate) fn rms_norm_impl(
        &self,
        x: &CpuBuf,
        w: &CpuBuf,
        norm: Norm,
        y: &mut CpuBuf,
    ) -> Result {
        check(
            "rms_norm",
            &[("x", x.0.len()), ("y", y.0.len())],
            w.0.len(),
            norm,
        )?;
        let (n, w) = (norm.width, &w.0[..norm.width]);
        let plus = f32::from(u8::from(norm.plus_one));
        let y = Shared::new(&mut y.0);
        self.ranges(norm.rows, n as f64 * 0.25 + 10.0, |rows| {
            for row in rows {
                let at = row * n..(row + 1) * n;
                // SAFETY: tiles own disjoint rows.
                let y = unsafe { y.part(at.clone()) };
                forward_row(&x.0[at], w, norm.eps, plus, y);
            }
        })
    }

    pub(crate) fn rms_norm_backward_impl(
        &self,
        x: &CpuBuf,
        w: &CpuBuf,
        dy: &CpuBuf,
        norm: Norm,
        grad: NormGrad<'_, CpuBuf>,
    ) -> Result {
        const OP: &str = "rms_norm_backward";
        let lens = [
            ("x", x.0.len()),
            ("dy", dy.0.len()),
            ("dx", grad.dx.0.len()),
        ];
        check(OP, &lens, w.0.len(), norm)?;
        if let Some(dw) = &grad.dw {
            need(OP, "dw", dw.0.len(), norm.width)?;
        }
        let (n, w) = (norm.width, &w.0[..norm.width]);
        let plus = f32::from(u8::from(norm.plus_one));
        let add = grad.acc == Acc::Add;
        let mut inverse = vec![0.0; norm.rows];
        let (dx, rms) = (Shared::new(&mut grad.dx.0), Shared::new(&mut inverse));
        self.ranges(norm.rows, n as f64 * 0.5 + 10.0, |rows| {
            for row in rows {
                let at = row * n..(row + 1) * n;
                // SAFETY: tiles own disjoint rows.
                let (dx, rms) = unsafe { (dx.part(at.clone()), rms.part(row..row + 1)) };
                let constants = (norm.eps, plus);
                rms[0] = backward_row(&x.0[at.clone()], w, &dy.0[at], constants, dx, add);
            }
        })?;
        if let Some(dw) = grad.dw {
            for (row, r) in inverse.iter().enumerate() {
                let at = row * n..(row + 1) * n;
                weight_row(&x.0[at.clone()], &dy.0[at], *r, &mut dw.0[..n]);
            }
        }
        Ok(())
    }
}
