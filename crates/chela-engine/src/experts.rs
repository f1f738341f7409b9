//! A mixture of experts in the place of a gated unit: rows are gathered by expert, each expert multiplies its rows, and what they give
//! is added up with the router's weights. Used by serving and training; no adapter stands on router
//! and experts, a whole model's training moves both.
//!
//! T rows, H hidden, E experts of width I, K of them for a row, R = T · K rows of experts.

use crate::{error::kernel, full::Grads, weights::BaseWeights};
use chela_core::EngineError;
use chela_kernels::{Acc, GluGrad, Kernels, Linear, Mat, MatMut, Routes, Routing, RowsMode};
use chela_model::LayerTensor;
use std::ops::Range;

/// The weights of one layer's experts.
pub struct Experts<K: Kernels> {
    /// `[E, H]`
    pub router: K::Weight,
    /// Each `[I, H]`.
    pub gate: Vec<K::Weight>,
    /// Each `[I, H]`.
    pub up: Vec<K::Weight>,
    /// Each `[H, I]`.
    pub down: Vec<K::Weight>,
}

/// The rows of experts, one expert after the other; within one in the order of rows, so that a row's sum over its experts is taken in
/// an order that does not depend on other rows.
struct Groups {
    /// Which row each is of `[R]`.
    rows: Vec<u32>,
    /// Its place in the routes `[R]`.
    places: Vec<usize>,
    /// Experts that have any, with their run of these rows.
    runs: Vec<(usize, Range<usize>)>,
}

impl Groups {
    fn new(routes: &Routes, active: usize, experts: usize) -> Self {
        let mut places: Vec<usize> = (0..routes.experts.len()).collect();
        places.sort_by_key(|place| routes.experts[*place]); // stable
        let mut runs: Vec<(usize, Range<usize>)> = Vec::with_capacity(experts);
        for (at, place) in places.iter().enumerate() {
            let expert = routes.experts[*place] as usize;
            match runs.last_mut() {
                Some((last, run)) if *last == expert => run.end = at + 1,
                _ => runs.push((expert, at..at + 1)),
            }
        }
        let rows = places.iter().map(|place| (place / active) as u32);
        Self {
            rows: rows.collect(),
            places,
            runs,
        }
    }

    fn factors(&self, routes: &Routes) -> Vec<f32> {
        self.places.iter().map(|p| routes.weights[*p]).collect()
    }
}

/// What the way back reads.
pub struct Routed<K: Kernels> {
    /// `[T, E]`
    logits: K::Buf,
    routes: Routes,
    groups: Groups,
    /// `[R, I]`
    gate: K::Buf,
    /// `[R, I]`
    up: K::Buf,
}

fn routing<K: Kernels>(base: &BaseWeights<K>, rows: usize) -> Result<Routing, EngineError> {
    let experts = base.config.experts;
    let experts =
        experts.ok_or_else(|| EngineError::Shape("a model without experts".to_owned()))?;
    Ok(Routing {
        rows,
        experts: experts.count,
        active: experts.active,
        normalised: experts.normalised,
    })
}

/// `out [T, H]` from the normed rows `h [T, H]`; replaced.
pub fn forward<K: Kernels>(
    k: &K,
    (base, experts): (&BaseWeights<K>, &Experts<K>),
    h: &K::Buf,
    (rows, mode): (usize, RowsMode),
    out: &mut K::Buf,
) -> Result<Routed<K>, EngineError> {
    let (hidden, wide) = (base.config.hidden, base.config.intermediate);
    let routing = routing(base, rows)?;
    let zeros = |n: usize| k.zeros(n).map_err(kernel);
    let mut logits = zeros(rows * routing.experts)?;
    let y = MatMut::new(&mut logits, rows, routing.experts);
    k.linear(Mat::new(h, rows, hidden), &experts.router, None, y, mode)
        .map_err(kernel)?;
    let routes = k.route(&logits, routing).map_err(kernel)?;
    let groups = Groups::new(&routes, routing.active, routing.experts);
    let r = groups.rows.len();
    let (mut x, mut gate, mut up) = (zeros(r * hidden)?, zeros(r * wide)?, zeros(r * wide)?);
    k.gather_rows(h, hidden, &groups.rows, &mut x)
        .map_err(kernel)?;
    for (expert, run) in &groups.runs {
        let n = run.len();
        k.linear_group(
            Mat::rows(&x, run.start, n, hidden),
            &mut [
                Linear {
                    weight: &experts.gate[*expert],
                    bias: None,
                    y: MatMut::rows(&mut gate, run.start, n, wide),
                },
                Linear {
                    weight: &experts.up[*expert],
                    bias: None,
                    y: MatMut::rows(&mut up, run.start, n, wide),
                },
            ],
            mode,
        )
        .map_err(kernel)?;
    }
    let mut act = zeros(r * wide)?;
    k.glu(base.activation, r * wide, &gate, &up, &mut act)
        .map_err(kernel)?;
    let mut y = x; // as large, and read no more
    for (expert, run) in &groups.runs {
        let n = run.len();
        let to = MatMut::rows(&mut y, run.start, n, hidden);
        let from = Mat::rows(&act, run.start, n, wide);
        k.linear(from, &experts.down[*expert], None, to, mode)
            .map_err(kernel)?;
    }
    k.scale_rows(&groups.factors(&routes), hidden, &mut y)
        .map_err(kernel)?;
    k.fill(rows * hidden, 0.0, out).map_err(kernel)?;
    k.scatter_add_rows(&y, hidden, &groups.rows, out)
        .map_err(kernel)?;
    Ok(Routed {
        logits,
        routes,
        groups,
        gate,
        up,
    })
}

/// Derivative by the normed rows `h [T, H]`: `dh [T, H]`, replaced, through the experts and through the weights that the router gave
/// them; where all weights are trained, also those of router and experts.
pub fn backward<K: Kernels>(
    k: &K,
    (base, experts): (&BaseWeights<K>, &Experts<K>),
    (routed, rows, h): (&Routed<K>, usize, &K::Buf),
    (dout, dh): (&K::Buf, &mut K::Buf),
    (layer, grads): (usize, &mut Grads<K::Buf>),
) -> Result<(), EngineError> {
    let (hidden, wide) = (base.config.hidden, base.config.intermediate);
    let routing = routing(base, rows)?;
    let zeros = |n: usize| k.zeros(n).map_err(kernel);
    let (groups, r) = (&routed.groups, routed.groups.rows.len());
    let mut dy = zeros(r * hidden)?;
    k.gather_rows(dout, hidden, &groups.rows, &mut dy)
        .map_err(kernel)?;
    let mut d_act = zeros(r * wide)?;
    for (expert, run) in &groups.runs {
        let n = run.len();
        let from = Mat::rows(&dy, run.start, n, hidden);
        let to = MatMut::rows(&mut d_act, run.start, n, wide);
        k.linear_dx(from, &experts.down[*expert], to, Acc::Set)
            .map_err(kernel)?;
    }
    // An expert's weight w scales what it gives: d w = dy · (act Dᵀ) = (dy D) · act.
    let mut act = zeros(r * wide)?;
    let n = r * wide;
    k.glu(base.activation, n, &routed.gate, &routed.up, &mut act)
        .map_err(kernel)?;
    let dots = k.row_dots(r, wide, (&d_act, &act)).map_err(kernel)?;
    let mut d_weights = vec![0.0; r];
    for (place, dot) in groups.places.iter().zip(dots) {
        d_weights[*place] = dot;
    }
    let factors = groups.factors(&routed.routes);
    k.scale_rows(&factors, wide, &mut d_act).map_err(kernel)?;
    if !grads.frozen_base() {
        k.scale_rows(&factors, hidden, &mut dy).map_err(kernel)?;
        for (expert, run) in &groups.runs {
            let place = (layer, LayerTensor::ExpertDowns, *expert);
            let x = Mat::rows(&act, run.start, run.len(), wide);
            let dy = Mat::rows(&dy, run.start, run.len(), hidden);
            grads.add_part(k, place, x, dy)?;
        }
    }
    let (mut d_gate, mut d_up) = (act, zeros(r * wide)?);
    let grad = GluGrad {
        dout: &d_act,
        dgate: &mut d_gate,
        dup: &mut d_up,
    };
    k.glu_backward(base.activation, n, &routed.gate, &routed.up, grad)
        .map_err(kernel)?;
    if !grads.frozen_base() {
        let mut x = zeros(r * hidden)?;
        k.gather_rows(h, hidden, &groups.rows, &mut x)
            .map_err(kernel)?;
        for (expert, run) in &groups.runs {
            let x = Mat::rows(&x, run.start, run.len(), hidden);
            for (d, tensor) in [
                (&d_gate, LayerTensor::ExpertGates),
                (&d_up, LayerTensor::ExpertUps),
            ] {
                let dy = Mat::rows(d, run.start, run.len(), wide);
                grads.add_part(k, (layer, tensor, *expert), x, dy)?;
            }
        }
    }
    let mut dx = dy; // as large, and read no more
    for (expert, run) in &groups.runs {
        let n = run.len();
        for (from, weight, acc) in [
            (&d_gate, &experts.gate[*expert], Acc::Set),
            (&d_up, &experts.up[*expert], Acc::Add),
        ] {
            let to = MatMut::rows(&mut dx, run.start, n, hidden);
            k.linear_dx(Mat::rows(from, run.start, n, wide), weight, to, acc)
                .map_err(kernel)?;
        }
    }
    k.fill(rows * hidden, 0.0, dh).map_err(kernel)?;
    k.scatter_add_rows(&dx, hidden, &groups.rows, dh)
        .map_err(kernel)?;
    let mut d_logits = zeros(rows * routing.experts)?;
    let routes = (&routed.routes, &d_weights[..]);
    k.route_backward(&routed.logits, routing, routes, &mut d_logits)
        .map_err(kernel)?;
    let from = Mat::new(&d_logits, rows, routing.experts);
    let place = (layer, LayerTensor::Router, 0);
    grads.add_part(k, place, Mat::new(h, rows, hidden), from)?;
    let to = MatMut::new(dh, rows, hidden);
    k.linear_dx(from, &experts.router, to, Acc::Add)
        .map_err(kernel)
}
