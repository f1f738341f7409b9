//! Routes to experts and their gradient, rows of stacked weights, factors of rows.

use super::{Random, close, many};
use crate::cpu::{Cpu, CpuBuf, simd};
use crate::dtype::DType;
use crate::error::KernelError;
use crate::ops::{Kernels, Mat, MatMut, Routing, RowsMode};
use crate::reference as plain;

const ROUTINGS: [(usize, usize, bool); 4] =
    [(7, 3, true), (7, 3, false), (4, 4, true), (5, 1, false)];

#[test]
fn routes_and_their_gradients() {
    let (cpu, mut random) = (Cpu::new(2), Random(40));
    for (experts, active, normalised) in ROUTINGS {
        let routing = Routing {
            rows: 6,
            experts,
            active,
            normalised,
        };
        let logits = random.buf(6 * experts);
        let wide = plain::wide(&logits.0);
        let routes = cpu.route(&logits, routing).unwrap();
        let (chosen, weights) = plain::route(&wide, routing);
        assert_eq!(routes.experts, chosen);
        close(&routes.weights, &weights, 1e-6);

        let d = random.floats(6 * active);
        let mut d_logits = random.buf(6 * experts); // replaced
        cpu.route_backward(&logits, routing, (&routes, &d), &mut d_logits)
            .unwrap();
        let loss = |z: &[f64]| {
            let weights = plain::route(z, routing).1;
            weights.iter().zip(&d).map(|(w, d)| w * f64::from(*d)).sum()
        };
        let by_logits = plain::finite_difference(&wide, loss);
        close(&d_logits.0, &by_logits, 1e-5);
    }
}

/// As it was computed at first, row by row with a sort: weights of a version that is made again depend on it.
fn by_sorting(logits: &[f32], routing: Routing) -> (Vec<u32>, Vec<f32>) {
    let (mut chosen, mut weights) = (Vec::new(), Vec::new());
    for row in logits.chunks_exact(routing.experts) {
        let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut p: Vec<f32> = row.iter().map(|z| simd::exp(z - most)).collect();
        let sum: f32 = p.iter().sum();
        p.iter_mut().for_each(|p| *p /= sum);
        let mut order: Vec<usize> = (0..routing.experts).collect();
        order.sort_by(|a, b| p[*b].total_cmp(&p[*a]).then(a.cmp(b)));
        let order = &order[..routing.active];
        let sum: f32 = order.iter().map(|e| p[*e]).sum();
        let norm = if routing.normalised { sum } else { 1.0 };
        chosen.extend(order.iter().map(|e| *e as u32));
        weights.extend(order.iter().map(|e| p[*e] / norm));
    }
    (chosen, weights)
}

#[test]
fn routes_have_the_bits_of_a_sort_however_many_threads() {
    let mut random = Random(43);
    for (experts, active, normalised) in
        [(128, 8, true), (60, 4, false), (7, 7, true), (3, 1, true)]
    {
        let routing = Routing {
            rows: many(300, 6),
            experts,
            active,
            normalised,
        };
        // Rounded, so that many are equal; and a row that is not a number.
        let mut logits = random.floats(routing.rows * experts);
        logits
            .iter_mut()
            .for_each(|z| *z = (*z * 8.0).round() / 4.0);
        logits[experts + 1] = f32::NAN;
        let (chosen, weights) = by_sorting(&logits, routing);
        let bits = |w: &[f32]| w.iter().map(|w| w.to_bits()).collect::<Vec<_>>();
        for threads in [1, 3] {
            let cpu = Cpu::new(threads);
            let routes = cpu.route(&CpuBuf(logits.clone()), routing).unwrap();
            assert_eq!(routes.experts, chosen);
            assert_eq!(bits(&routes.weights), bits(&weights));
        }
    }
}

#[test]
fn equal_logits_choose_the_first_and_wrong_numbers_are_refused() {
    let cpu = Cpu::new(1);
    let mut routing = Routing {
        rows: 1,
        experts: 4,
        active: 2,
        normalised: true,
    };
    let logits = CpuBuf(vec![0.5; 4]);
    let routes = cpu.route(&logits, routing).unwrap();
    assert_eq!(
        (&routes.experts[..], &routes.weights[..]),
        (&[0, 1][..], &[0.5; 2][..])
    );
    let far = CpuBuf(vec![-1e30, 1e30, 0.0, -1e30]);
    let routes = cpu.route(&far, routing).unwrap();
    assert_eq!((routes.experts[0], routes.weights[0]), (1, 1.0));
    routing.active = 5;
    let error = cpu.route(&logits, routing).unwrap_err();
    assert!(
        matches!(error, KernelError::Index { index: 5, .. }),
        "{error}"
    );
    routing.rows = 2;
    routing.active = 1;
    assert!(cpu.route(&logits, routing).is_err());
}

#[test]
fn rows_of_a_stack_are_weights_of_their_own() {
    let (cpu, mut random) = (Cpu::new(2), Random(41));
    for dtype in [DType::F32, DType::BF16, DType::Q8_0, DType::Q4_K] {
        let (rows, cols) = (24, 256);
        let (stack, numbers) = random.weight(&cpu, dtype, rows, cols);
        let x = random.buf(3 * cols);
        for part in [0..8, 8..24, 23..24] {
            let one = cpu.weight_rows(&stack, part.clone()).unwrap();
            assert_eq!(cpu.weight_shape(&one), (part.len(), cols));
            let n = part.len();
            let mut y = cpu.zeros(3 * n).unwrap();
            let to = MatMut::new(&mut y, 3, n);
            cpu.linear(Mat::new(&x, 3, cols), &one, None, to, RowsMode::Decode)
                .unwrap();
            let own = &numbers[part.start * cols..part.end * cols];
            let want = plain::matmul_nt(&plain::wide(&x.0), own, (3, n, cols));
            close(&y.0, &want, 1e-3);
        }
        assert!(cpu.weight_rows(&stack, 20..25).is_err());
    }
}

#[test]
fn rows_have_factors_and_products() {
    let (cpu, mut random) = (Cpu::new(1), Random(42));
    let (rows, width) = (5, 37);
    let (x, d) = (random.buf(rows * width), random.buf(rows * width));
    let factors = random.floats(rows);
    let mut y = x.clone();
    cpu.scale_rows(&factors, width, &mut y).unwrap();
    let by_row = |i: usize| f64::from(x.0[i]) * f64::from(factors[i / width]);
    close(
        &y.0,
        &(0..rows * width).map(by_row).collect::<Vec<_>>(),
        1e-6,
    );
    let by_factors = cpu.row_dots(rows, width, (&x, &d)).unwrap();
    let loss = |f: &[f64]| {
        let term = |i: usize| f64::from(x.0[i]) * f[i / width] * f64::from(d.0[i]);
        (0..rows * width).map(term).sum()
    };
    let want = plain::finite_difference(&plain::wide(&factors), loss);
    close(&by_factors, &want, 1e-5);
    assert!(cpu.row_dots(rows + 1, width, (&x, &d)).is_err());
}
