//! Gated units, sums over buffers, and the optimizer's step.
#![allow(unsafe_code)]

use core::ops::Range;

use super::simd::{LANES, exp, simd_fn};
use super::tiles::Shared;
use super::{Cpu, CpuBuf, equal, need};
use crate::error::Result;
use crate::ops::{Activation, AdamW, GluGrad};

/// Numbers in one piece of a reduction: fixed, so that sums do not depend on the threads.
const PIECE: usize = 1 << 14;

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `tanh(x) = 1 - 2 / (exp(2x) + 1)`
#[inline(always)]
fn tanh(x: f32) -> f32 {
    1.0 - 2.0 / (exp(2.0 * x) + 1.0)
}

const GELU_A: f32 = 0.797_884_6; // sqrt(2 / pi)
const GELU_B: f32 = 0.044_715;

/// The activation and its derivative.
#[inline(always)]
fn activate(silu: bool, x: f32) -> (f32, f32) {
    if silu {
        let s = sigmoid(x);
        (x * s, s * (1.0 + x * (1.0 - s)))
    } else {
        let t = tanh(GELU_A * (x + GELU_B * x * x * x));
        let slope = GELU_A * (1.0 + 3.0 * GELU_B * x * x);
        (
            0.5 * x * (1.0 + t),
            0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * slope,
        )
    }
}

simd_fn! {
    fn silu_glu(gate: &[f32], up: &[f32], out: &mut [f32]) {
        for ((o, g), u) in out.iter_mut().zip(gate).zip(up) {
            *o = activate(true, *g).0 * u;
        }
    }
}

simd_fn! {
    fn gelu_glu(gate: &[f32], up: &[f32], out: &mut [f32]) {
        for ((o, g), u) in out.iter_mut().zip(gate).zip(up) {
            *o = activate(false, *g).0 * u;
        }
    }
}

simd_fn! {
    fn silu_back(gate: &[f32], up: &[f32], dout: &[f32], dgate: &mut [f32], dup: &mut [f32]) {
        for ((((g, u), d), dg), du) in gate.iter().zip(up).zip(dout).zip(dgate).zip(dup) {
            let (a, slope) = activate(true, *g);
            *dg = d * u * slope;
            *du = d * a;
        }
    }
}

simd_fn! {
    fn gelu_back(gate: &[f32], up: &[f32], dout: &[f32], dgate: &mut [f32], dup: &mut [f32]) {
        for ((((g, u), d), dg), du) in gate.iter().zip(up).zip(dout).zip(dgate).zip(dup) {
            let (a, slope) = activate(false, *g);
            *dg = d * u * slope;
            *du = d * a;
        }
    }
}

simd_fn! {
    fn squares(x: &[f32]) -> f64 {
        let mut acc = [0.0_f64; LANES];
        let chunks = x.chunks_exact(LANES);
        let rest: f64 = chunks.remainder().iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
        for c in chunks {
            for l in 0..LANES {
                acc[l] += f64::from(c[l]) * f64::from(c[l]);
            }
        }
        acc.iter().sum::<f64>() + rest
    }
}

simd_fn! {
    // 0 x is 0 for a finite number and NaN for any other; NaN survives every addition.
    fn finite(x: &[f32]) -> bool {
        let mut acc = [0.0_f32; LANES];
        let chunks = x.chunks_exact(LANES);
        let rest: f32 = chunks.remainder().iter().map(|x| 0.0 * x).sum();
        for c in chunks {
            for l in 0..LANES {
                acc[l] += 0.0 * c[l];
            }
        }
        acc.iter().sum::<f32>() + rest == 0.0
    }
}

simd_fn! {
    fn scale_by(alpha: f32, x: &mut [f32]) {
        for x in x {
            *x *= alpha;
        }
    }
}

simd_fn! {
    fn adamw_piece(p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], c: (AdamW, f32, f32)) {
        let (a, rate, root) = c;
        let keep = 1.0 - a.lr * a.weight_decay;
        for (((p, g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
            let g = g * a.grad_scale;
            *m = a.beta1 * *m + (1.0 - a.beta1) * g;
            *v = a.beta2 * *v + (1.0 - a.beta2) * g * g;
            *p = *p * keep - rate * *m / ((*v * root).sqrt() + a.eps);
        }
    }
}

impl Cpu {
    fn pieces(&self, n: usize, cost: f64, task: impl Fn(Range<usize>) + Sync) -> Result {
        let pieces = n.div_ceil(1024);
        self.ranges(pieces, cost * 1024.0, |r| {
            task(r.start * 1024..(r.end * 1024).min(n))
        })
    }

    pub(crate) fn glu_impl(
        &self,
        activation: Activation,
        n: usize,
        (gate, up): (&CpuBuf, &CpuBuf),
        out: &mut CpuBuf,
    ) -> Result {
        const OP: &str = "glu";
        need(OP, "gate", gate.0.len(), n)?;
        need(OP, "up", up.0.len(), n)?;
        need(OP, "out", out.0.len(), n)?;
        let out = Shared::new(&mut out.0);
        self.pieces(n, 1.0, |r| {
            // SAFETY: tiles own disjoint ranges.
            let out = unsafe { out.part(r.clone()) };
            match activation {
                Activation::Silu => silu_glu(&gate.0[r.clone()], &up.0[r], out),
                Activation::GeluTanh => gelu_glu(&gate.0[r.clone()], &up.0[r], out),
            }
        })
    }

    pub(crate) fn glu_backward_impl(
        &self,
        activation: Activation,
        n: usize,
        (gate, up): (&CpuBuf, &CpuBuf),
        grad: GluGrad<'_, CpuBuf>,
    ) -> Result {
        const OP: &str = "glu_backward";
        for (what, buf) in [
            ("gate", gate),
            ("up", up),
            ("dout", grad.dout),
            ("dgate", &*grad.dgate),
            ("dup", &*grad.dup),
        ] {
            need(OP, what, buf.0.len(), n)?;
        }
        let (dgate, dup) = (Shared::new(&mut grad.dgate.0), Shared::new(&mut grad.dup.0));
        let dout = &grad.dout.0;
        self.pieces(n, 1.5, |r| {
            // SAFETY: tiles own disjoint ranges.
            let (dgate, dup) = unsafe { (dgate.part(r.clone()), dup.part(r.clone())) };
            let (gate, up, dout) = (&gate.0[r.clone()], &up.0[r.clone()], &dout[r]);
            match activation {
                Activation::Silu => silu_back(gate, up, dout, dgate, dup),
                Activation::GeluTanh => gelu_back(gate, up, dout, dgate, dup),
            }
        })
    }

    pub(crate) fn axpy_impl(&self, n: usize, alpha: f32, x: &CpuBuf, y: &mut CpuBuf) -> Result {
        need("axpy", "x", x.0.len(), n)?;
        need("axpy", "y", y.0.len(), n)?;
        let y = Shared::new(&mut y.0);
        self.pieces(n, 0.3, |r| {
            // SAFETY: tiles own disjoint ranges.
            super::simd::axpy(alpha, &x.0[r.clone()], unsafe { y.part(r) });
        })
    }

    pub(crate) fn scale_impl(&self, n: usize, alpha: f32, x: &mut CpuBuf) -> Result {
        need("scale", "x", x.0.len(), n)?;
        let x = Shared::new(&mut x.0);
        // SAFETY: tiles own disjoint ranges.
        self.pieces(n, 0.2, |r| scale_by(alpha, unsafe { x.part(r) }))
    }

    /// Applies `task` to fixed pieces and returns their results in order.
    fn reduce<T: Default + Clone + Send>(
        &self,
        x: &[f32],
        task: impl Fn(&[f32]) -> T + Sync,
    ) -> Result<Vec<T>> {
        let mut results = vec![T::default(); x.len().div_ceil(PIECE)];
        let out = Shared::new(&mut results);
        self.ranges(results.len(), 0.2 * PIECE as f64, |pieces| {
            for piece in pieces {
                let part = &x[piece * PIECE..x.len().min((piece + 1) * PIECE)];
                // SAFETY: tiles own disjoint pieces.
                unsafe { out.put(piece, task(part)) };
            }
        })?;
        Ok(results)
    }

    pub(crate) fn sum_squares_impl(&self, n: usize, x: &CpuBuf) -> Result<f64> {
        need("sum_squares", "x", x.0.len(), n)?;
        Ok(self.reduce(&x.0[..n], squares)?.iter().sum())
    }

    pub(crate) fn all_finite_impl(&self, n: usize, x: &CpuBuf) -> Result<bool> {
        need("all_finite", "x", x.0.len(), n)?;
        Ok(self.reduce(&x.0[..n], finite)?.iter().all(|f| *f))
    }

    pub(crate) fn adamw_impl(
        &self,
        param: &mut CpuBuf,
        grad: &CpuBuf,
        (first, second): (&mut CpuBuf, &mut CpuBuf),
        adamw: AdamW,
    ) -> Result {
        let n = param.0.len();
        for (what, buf) in [("grad", grad), ("first", &*first), ("second", &*second)] {
            equal("adamw", what, n, buf.0.len())?;
        }
        let correct = |beta: f32| (1.0 - f64::from(beta).powf(adamw.step.max(1) as f64)) as f32;
        let constants = (
            adamw,
            adamw.lr / correct(adamw.beta1),
            1.0 / correct(adamw.beta2),
        );
        let (p, g) = (Shared::new(&mut param.0), &grad.0);
        let (m, v) = (Shared::new(&mut first.0), Shared::new(&mut second.0));
        self.pieces(n, 1.5, |r| {
            // SAFETY: tiles own disjoint ranges.
            let (p, m, v) = unsafe { (p.part(r.clone()), m.part(r.clone()), v.part(r.clone())) };
            adamw_piece(p, &g[r], m, v, constants);
        })
    }
}
