//! Norms, rotary embedding, rows copied about.

use super::{Random, close, many};
use crate::cpu::Cpu;
use crate::ops::{Acc, Kernels, Norm, NormGrad, Rope, RopeDirection};
use crate::reference as plain;

#[test]
fn rms_norm_and_its_gradients() {
    let (cpu, mut random) = (Cpu::new(2), Random(20));
    for (rows, width) in [(1, many(576, 40)), (3, 17), (many(9, 2), many(64, 20))] {
        for plus_one in [false, true] {
            let norm = Norm {
                rows,
                width,
                eps: 1e-5,
                plus_one,
            };
            let n = rows * width;
            let (x, w, dy) = (random.buf(n), random.buf(width), random.buf(n));
            let mut y = cpu.zeros(n).unwrap();
            cpu.rms_norm(&x, &w, norm, &mut y).unwrap();
            let (xw, ww, dyw) = (plain::wide(&x.0), plain::wide(&w.0), plain::wide(&dy.0));
            close(&y.0, &plain::rms_norm(&xw, &ww, norm), 1e-6);

            let mut dx = random.buf(n);
            let start = dx.clone();
            let mut dw = cpu.zeros(width).unwrap();
            let grad = NormGrad {
                dx: &mut dx,
                acc: Acc::Add,
                dw: Some(&mut dw),
            };
            cpu.rms_norm_backward(&x, &w, &dy, norm, grad).unwrap();
            let loss = |y: Vec<f64>| y.iter().zip(&dyw).map(|(y, d)| y * d).sum::<f64>();
            let by_w = plain::finite_difference(&ww, |w| loss(plain::rms_norm(&xw, w, norm)));
            close(&dw.0, &by_w, 1e-5);
            let mut by_x = plain::finite_difference(&xw, |x| loss(plain::rms_norm(x, &ww, norm)));
            by_x.iter_mut()
                .zip(&start.0)
                .for_each(|(d, s)| *d += f64::from(*s));
            close(&dx.0, &by_x, 1e-5);
        }
    }
}

#[test]
fn rope_turns_and_turns_back() {
    let (cpu, mut random) = (Cpu::new(2), Random(21));
    let positions = [0, 1, 500, 8191];
    for (half, head_dim) in [(32, 64), (8, 32)] {
        let inv_freq: Vec<f32> = (0..half)
            .map(|i| 10000_f32.powf(-(i as f32) / half as f32))
            .collect();
        let shape = Rope {
            rows: 4,
            heads: 3,
            head_dim,
            half,
        };
        let x = random.buf(4 * 3 * head_dim);
        let mut table = cpu.zeros(4 * 2 * half).unwrap();
        cpu.rope_table(&positions, &inv_freq, 1.0, &mut table)
            .unwrap();
        let mut y = x.clone();
        cpu.rope(&mut y, &table, shape, RopeDirection::Forward)
            .unwrap();
        let expected = plain::rope(&plain::wide(&x.0), &positions, &inv_freq, shape, 1.0);
        // Angles are rounded to f32 on purpose: at position 8191 that moves them by 2^-12.
        close(&y.0, &expected, 5e-4);
        cpu.rope(&mut y, &table, shape, RopeDirection::Backward)
            .unwrap();
        close(&y.0, &plain::wide(&x.0), 1e-6);
    }
}

#[test]
fn rope_backward_is_the_transpose_under_a_scale() {
    let (cpu, mut random) = (Cpu::new(1), Random(22));
    let shape = Rope {
        rows: 1,
        heads: 1,
        head_dim: 8,
        half: 4,
    };
    let mut table = cpu.zeros(8).unwrap();
    cpu.rope_table(&[3], &[1.0, 0.5, 0.2, 0.1], 1.3, &mut table)
        .unwrap();
    let (x, dy) = (random.buf(8), random.buf(8));
    let (mut y, mut dx) = (x.clone(), dy.clone());
    cpu.rope(&mut y, &table, shape, RopeDirection::Forward)
        .unwrap();
    cpu.rope(&mut dx, &table, shape, RopeDirection::Backward)
        .unwrap();
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    assert!((dot(&y.0, &dy.0) - dot(&x.0, &dx.0)).abs() < 1e-4);
}

#[test]
fn rows_are_gathered_and_scattered() {
    let cpu = Cpu::new(1);
    let src = cpu.upload(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).unwrap();
    let mut dst = cpu.zeros(4).unwrap();
    cpu.gather_rows(&src, 2, &[2, 0], &mut dst).unwrap();
    assert_eq!(dst.0, [5.0, 6.0, 1.0, 2.0]);
    assert!(cpu.gather_rows(&src, 2, &[3], &mut dst).is_err());
    let mut sum = cpu.zeros(6).unwrap();
    cpu.scatter_add_rows(&dst, 2, &[1, 1], &mut sum).unwrap();
    assert_eq!(sum.0, [0.0, 0.0, 6.0, 8.0, 0.0, 0.0]);
    cpu.copy_within(&mut sum, 2, 3, 2).unwrap();
    cpu.copy(&src, 4, &mut sum, 0, 2).unwrap();
    assert_eq!(cpu.download(&sum).unwrap(), [5.0, 6.0, 6.0, 6.0, 8.0, 0.0]);
    assert!(cpu.copy(&src, 5, &mut sum, 0, 2).is_err());
}
