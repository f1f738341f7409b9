//! Mixture of experts: which experts a row goes to, with what weight, and the rows' own factors and products.

use super::{Cpu, CpuBuf, need, simd};
use crate::error::{KernelError, Result};
use crate::ops::{Routes, Routing};

const OP: &str = "route";

/// Softmax of a row of logits.
fn softmax(logits: &[f32]) -> Vec<f32> {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut p: Vec<f32> = logits.iter().map(|z| simd::exp(z - most)).collect();
    let sum: f32 = p.iter().sum();
    p.iter_mut().for_each(|p| *p /= sum);
    p
}

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
            experts: Vec::with_capacity(rows * active),
            weights: Vec::with_capacity(rows * active),
        };
        for row in logits.0[..rows * experts].chunks_exact(experts) {
            let p = softmax(row);
            let mut order: Vec<usize> = (0..experts).collect();
            // The likeliest first, ties by number.
            order.sort_by(|a, b| p[*b].total_cmp(&p[*a]).then(a.cmp(b)));
            let chosen = &order[..active];
            let sum: f32 = chosen.iter().map(|e| p[*e]).sum();
            let norm = if routing.normalised { sum } else { 1.0 };
            routes.experts.extend(chosen.iter().map(|e| *e as u32));
            routes.weights.extend(chosen.iter().map(|e| p[*e] / norm));
        }
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
            let p = softmax(z);
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
