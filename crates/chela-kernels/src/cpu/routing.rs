//! Mixture of experts: which experts a row goes to, with what weight, and the rows' own factors and products.
#![allow(unsafe_code)]

use super::simd::simd_fn;
use super::tiles::{Shared, with_scratch};
use super::{Cpu, CpuBuf, need, simd};
use crate::error::{KernelError, Result};
use crate::ops::{Routes, Routing};

const OP: &str = "route";

simd_fn! {
    /// Softmax of a row of logits.
    fn softmax(logits: &[f32], p: &mut [f32]) {
        let most = simd::max(logits);
        for (p, z) in p.iter_mut().zip(logits) {
            *p = simd::exp(z - most);
        }
        // One after the other, as it always was: weights of a version that is made again have its bits.
        let sum: f32 = p.iter().sum();
        p.iter_mut().for_each(|p| *p /= sum);
    }
}

/// The likeliest `chosen.len()` of `p`, the likeliest first, ties by number.
fn likeliest(p: &[f32], chosen: &mut [u32]) {
    let above = |a: f32, b: f32| a.total_cmp(&b).is_gt();
    let last = chosen.len() - 1;
    for e in 0..p.len() {
        let full = e > last;
        // Numbers rise, so what comes later has to be more to be before.
        if full && !above(p[e], p[chosen[last] as usize]) {
            continue;
        }
        let mut at = e.min(last);
        while at > 0 && above(p[e], p[chosen[at - 1] as usize]) {
            chosen[at] = chosen[at - 1];
            at -= 1;
        }
        chosen[at] = e as u32;
    }
}

/// Nanoseconds of a logit on its way to a route, so that tiles are neither too short nor too long.
const LOGIT_NS: f64 = 5.0;

fn check(routing: Routing) -> Result {
    if routing.active == 0 || routing.active > routing.experts {
        return Err(KernelError::Index {
            op: OP,
            what: "number of active experts",
            index: routing.active,
            limit: routing.experts + 1,
        });
    }
    Ok(())
}

impl Cpu {
    pub(crate) fn route_impl(&self, logits: &CpuBuf, routing: Routing) -> Result<Routes> {
        let Routing {
            rows,
            experts,
            active,
            ..
        } = routing;
        check(routing)?;
        need(OP, "logits", logits.0.len(), rows * experts)?;
        let mut routes = Routes {
            experts: vec![0; rows * active],
            weights: vec![0.0; rows * active],
        };
        let to = (
            Shared::new(&mut routes.experts),
            Shared::new(&mut routes.weights),
        );
        self.ranges(rows, LOGIT_NS * experts as f64, |rows| {
            let part = rows.start * active..rows.end * active;
            // SAFETY: `routes` outlives the section, and no two ranges share a row.
            let (chosen, weights) = unsafe { (to.0.part(part.clone()), to.1.part(part)) };
            let rows = logits.0[rows.start * experts..rows.end * experts].chunks_exact(experts);
            let outputs = chosen
                .chunks_exact_mut(active)
                .zip(weights.chunks_exact_mut(active));
            with_scratch(experts, |p| {
                for (row, (chosen, weights)) in rows.zip(outputs) {
                    softmax(row, p);
                    likeliest(p, chosen);
                    let sum: f32 = chosen.iter().map(|e| p[*e as usize]).sum();
                    let norm = if routing.normalised { sum } else { 1.0 };
                    for (weight, e) in weights.iter_mut().zip(chosen) {
                        *weight = p[*e as usize] / norm;
                    }
                }
            });
        })?;
        Ok(routes)
    }

    pub(crate) fn route_backward_impl(
        &self,
        logits: &CpuBuf,
        routing: Routing,
        (routes, d_weights): (&Routes, &[f32]),
        d_logits: &mut CpuBuf,
    ) -> Result {
        let Routing {
            rows,
            experts,
            active,
            ..
        } = routing;
        const OP: &str = "route_backward";
        check(routing)?;
        need(OP, "logits", logits.0.len(), rows * experts)?;
        need(OP, "d_logits", d_logits.0.len(), rows * experts)?;
        need(OP, "routes", routes.experts.len(), rows * active)?;
        need(OP, "weights", routes.weights.len(), rows * active)?;
        need(OP, "d_weights", d_weights.len(), rows * active)?;
        for &expert in &routes.experts {
            super::index(OP, "expert", expert as usize, experts)?;
        }
        let inputs = logits.0.chunks_exact(experts);
        let outputs = d_logits.0.chunks_exact_mut(experts);
        let mut p = vec![0.0; experts];
        for (row, (z, dz)) in inputs.zip(outputs).take(rows).enumerate() {
            let at = row * active..(row + 1) * active;
            let (chosen, d_w) = (&routes.experts[at.clone()], &d_weights[at.clone()]);
            dz.fill(0.0);
            if routing.normalised {
                // Weights that add up to 1: the softmax over the chosen ones alone.
                let w = &routes.weights[at];
                let mean: f32 = w.iter().zip(d_w).map(|(w, d)| w * d).sum();
                for ((e, w), d) in chosen.iter().zip(w).zip(d_w) {
                    dz[*e as usize] = w * (d - mean);
                }
                continue;
            }
            softmax(z, &mut p);
            let terms = chosen.iter().zip(d_w);
            let mean: f32 = terms.clone().map(|(e, d)| p[*e as usize] * d).sum();
            for (dz, p) in dz.iter_mut().zip(&p) {
                *dz = -p * mean;
            }
            for (e, d) in terms {
                dz[*e as usize] += p[*e as usize] * d;
            }
        }
        Ok(())
    }

    pub(crate) fn scale_rows_impl(&self, factors: &[f32], width: usize, x: &mut CpuBuf) -> Result {
        need("scale_rows", "x", x.0.len(), factors.len() * width)?;
        if width == 0 {
            return Ok(());
        }
        for (row, factor) in x.0.chunks_exact_mut(width).zip(factors) {
            row.iter_mut().for_each(|x| *x *= factor);
        }
        Ok(())
    }

    pub(crate) fn row_dots_impl(
        &self,
        rows: usize,
        width: usize,
        (a, b): (&CpuBuf, &CpuBuf),
    ) -> Result<Vec<f32>> {
        need("row_dots", "a", a.0.len(), rows * width)?;
        need("row_dots", "b", b.0.len(), rows * width)?;
        if width == 0 {
            return Ok(vec![0.0; rows]);
        }
        let pairs = a.0.chunks_exact(width).zip(b.0.chunks_exact(width));
        Ok(pairs.take(rows).map(|(a, b)| simd::dot(a, b)).collect())
    }
}
