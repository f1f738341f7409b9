//! Gated units, sums, the optimizer, the exponential.

use super::{Random, close, many};
use crate::cpu::{Cpu, simd};
use crate::ops::{Activation, AdamW, GluGrad, Kernels};
use crate::reference as plain;

#[test]
fn exp_is_exact_to_a_few_units() {
    for i in (-87_000..88_700).step_by(many(1, 997)) {
        let x = i as f32 / 1000.0;
        let (got, exact) = (f64::from(simd::exp(x)), f64::from(x).exp());
        assert!((got - exact).abs() <= 3e-7 * exact, "exp({x}) = {got}");
    }
    assert_eq!(simd::exp(f32::NEG_INFINITY), 0.0);
    assert_eq!(simd::exp(-200.0), 0.0);
    assert_eq!(simd::exp(0.0), 1.0);
    assert_eq!(simd::exp(f32::INFINITY), f32::INFINITY);
    assert!(simd::exp(f32::NAN).is_nan());
}

#[test]
fn gated_units_and_their_gradients() {
    let (cpu, mut random) = (Cpu::new(2), Random(30));
    let n = many(100, 10);
    for activation in [Activation::Silu, Activation::GeluTanh] {
        let (gate, up, dout) = (random.buf(n), random.buf(n), random.buf(n));
        let (g, u, d) = (
            plain::wide(&gate.0),
            plain::wide(&up.0),
            plain::wide(&dout.0),
        );
        let mut out = cpu.zeros(n).unwrap();
        cpu.glu(activation, n, &gate, &up, &mut out).unwrap();
        close(&out.0, &plain::glu(activation, &g, &u), 1e-6);
        let (mut dgate, mut dup) = (cpu.zeros(n).unwrap(), cpu.zeros(n).unwrap());
        let grad = GluGrad {
            dout: &dout,
            dgate: &mut dgate,
            dup: &mut dup,
        };
        cpu.glu_backward(activation, n, &gate, &up, grad).unwrap();
        let loss = |y: Vec<f64>| y.iter().zip(&d).map(|(y, d)| y * d).sum::<f64>();
        let by_gate = plain::finite_difference(&g, |g| loss(plain::glu(activation, g, &u)));
        let by_up = plain::finite_difference(&u, |u| loss(plain::glu(activation, &g, u)));
        close(&dgate.0, &by_gate, 1e-5);
        close(&dup.0, &by_up, 1e-5);
    }
}

#[test]
fn gated_units_survive_extreme_gates() {
    let cpu = Cpu::new(1);
    let gate = cpu.upload(&[-1e30, -200.0, 200.0, 1e30]).unwrap();
    let up = cpu.upload(&[1.0; 4]).unwrap();
    for activation in [Activation::Silu, Activation::GeluTanh] {
        let mut out = cpu.zeros(4).unwrap();
        cpu.glu(activation, 4, &gate, &up, &mut out).unwrap();
        assert_eq!(
            (out.0[1].abs(), out.0[2], out.0[3]),
            (0.0, 200.0, 1e30),
            "{activation:?}"
        );
        assert_eq!(out.0[0].abs(), 0.0);
    }
}

#[test]
fn sums_and_checks() {
    let (cpu, mut random) = (Cpu::new(3), Random(31));
    let n = many(100_003, 1_003);
    let mut x = random.buf(n);
    let exact: f64 = x.0.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
    let got = cpu.sum_squares(n, &x).unwrap();
    assert!((got - exact).abs() < 1e-9 * exact);
    assert_eq!(
        got.to_bits(),
        Cpu::new(1).sum_squares(n, &x).unwrap().to_bits()
    );
    assert!(cpu.all_finite(n, &x).unwrap());
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for at in [0, n - 4, n - 1] {
            let keep = core::mem::replace(&mut x.0[at], bad);
            assert!(!cpu.all_finite(n, &x).unwrap());
            x.0[at] = keep;
        }
    }
    x.0[n - 1] = f32::NAN;
    assert!(cpu.all_finite(n - 1, &x).unwrap());
}

#[test]
fn axpy_scale_fill() {
    let (cpu, mut random) = (Cpu::new(2), Random(32));
    let n = many(5000, 100);
    let (x, mut y) = (random.buf(n), random.buf(n));
    let start = y.clone();
    cpu.axpy(n - 1, 0.5, &x, &mut y).unwrap();
    cpu.scale(n - 1, 2.0, &mut y).unwrap();
    let mut expected = plain::wide(&start.0);
    for (e, x) in expected.iter_mut().zip(&x.0).take(n - 1) {
        *e = 2.0 * (*e + 0.5 * f64::from(*x));
    }
    close(&y.0, &expected, 1e-6);
    cpu.fill(2, 7.0, &mut y).unwrap();
    assert_eq!((y.0[0], y.0[1], y.0[n - 1]), (7.0, 7.0, start.0[n - 1]));
}

#[test]
fn adamw_follows_the_paper() {
    let (cpu, mut random) = (Cpu::new(2), Random(33));
    let n = many(3000, 100);
    let mut p = random.buf(n);
    let (mut m, mut v) = (cpu.zeros(n).unwrap(), cpu.zeros(n).unwrap());
    let mut state: Vec<(f64, f64, f64)> = p.0.iter().map(|p| (f64::from(*p), 0.0, 0.0)).collect();
    for step in 1..=5 {
        let g = random.buf(n);
        let adamw = AdamW {
            lr: 1e-2,
            beta1: 0.9,
            beta2: 0.99,
            eps: 1e-8,
            weight_decay: 0.1,
            step,
            grad_scale: 0.7,
        };
        cpu.adamw(&mut p, &g, &mut m, &mut v, adamw).unwrap();
        for (s, g) in state.iter_mut().zip(&g.0) {
            *s = plain::adamw((s.0, f64::from(*g), s.1, s.2), adamw);
        }
    }
    close(&p.0, &state.iter().map(|s| s.0).collect::<Vec<_>>(), 1e-5);
    close(&v.0, &state.iter().map(|s| s.2).collect::<Vec<_>>(), 1e-5);
}
