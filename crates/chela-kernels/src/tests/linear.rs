//! Weights, products with them, dense products.

use std::sync::Arc;

use super::{Random, close, many};
use crate::cpu::{Cpu, CpuBuf};
use crate::dtype::DType;
use crate::error::KernelError;
use crate::ops::{Acc, Kernels, Linear, Mat, MatMut, Product, RowsMode};
use crate::reference as plain;

#[test]
fn embedding_rows_are_the_stored_numbers() {
    let (cpu, mut random) = (Cpu::new(1), Random(1));
    for dtype in DType::ALL {
        let (weight, numbers) = random.weight(&cpu, dtype, 5, 512);
        let mut out = cpu.zeros(3 * 512).unwrap();
        cpu.embed(&weight, &[4, 0, 4], &mut out).unwrap();
        let expected = [&numbers[4 * 512..], &numbers[..512], &numbers[4 * 512..]].concat();
        close(&out.0, &expected, 1e-6);
        let error = cpu.embed(&weight, &[5], &mut out).unwrap_err();
        assert!(matches!(
            error,
            KernelError::Index {
                index: 5,
                limit: 5,
                ..
            }
        ));
    }
}

#[test]
#[cfg_attr(miri, ignore = "minutes under Miri")]
fn linear_of_every_type_and_number_of_rows() {
    let mut random = Random(2);
    for threads in [1, 3] {
        let cpu = Cpu::new(threads);
        for dtype in DType::ALL {
            let (n, k) = (70, 512);
            let (weight, w) = random.weight(&cpu, dtype, n, k);
            let bias = random.buf(n);
            for m in [1, 2, 3, 7, 16, 17, 300] {
                let x = random.buf(m * k);
                let mut expected = plain::matmul_nt(&plain::wide(&x.0), &w, (m, n, k));
                for (i, e) in expected.iter_mut().enumerate() {
                    *e += f64::from(bias.0[i % n]);
                }
                for mode in [RowsMode::Decode, RowsMode::Prefill] {
                    let mut y = cpu.zeros(m * n).unwrap();
                    let out = MatMut::new(&mut y, m, n);
                    cpu.linear(Mat::new(&x, m, k), &weight, Some(&bias), out, mode)
                        .unwrap();
                    // Few rows of 8-bit weights meet activations rounded to 16 bits (see below).
                    close(
                        &y.0,
                        &expected,
                        if dtype == DType::Q8_0 { 5e-5 } else { 1e-5 },
                    );
                }
            }
        }
    }
}

#[test]
fn plain_types_take_any_number_of_columns() {
    let (cpu, mut random) = (Cpu::new(1), Random(3));
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for k in [1, 7, 33, many(100, 40)] {
            let (weight, w) = random.weight(&cpu, dtype, 9, k);
            let x = random.buf(5 * k);
            let expected = plain::matmul_nt(&plain::wide(&x.0), &w, (5, 9, k));
            let mut y = cpu.zeros(45).unwrap();
            let out = MatMut::new(&mut y, 5, 9);
            cpu.linear(Mat::new(&x, 5, k), &weight, None, out, RowsMode::Decode)
                .unwrap();
            close(&y.0, &expected, 1e-5);
        }
    }
}

/// The promise that makes a seed mean the same whatever else runs.
#[test]
#[cfg_attr(miri, ignore = "minutes under Miri")]
fn a_row_does_not_depend_on_the_others() {
    let mut random = Random(4);
    let cpu = Cpu::new(2);
    for dtype in DType::ALL {
        let (n, k) = (37, 512);
        let (weight, _) = random.weight(&cpu, dtype, n, k);
        let x = random.buf(64 * k);
        let run = |from: usize, m: usize| {
            let mut y = cpu.zeros(m * n).unwrap();
            let out = MatMut::new(&mut y, m, n);
            cpu.linear(
                Mat::rows(&x, from, m, k),
                &weight,
                None,
                out,
                RowsMode::Decode,
            )
            .unwrap();
            y.0
        };
        let single: Vec<f32> = (0..64).flat_map(|i| run(i, 1)).collect();
        for m in 1..=64 {
            assert_eq!(run(0, m), single[..m * n], "{dtype} with {m} rows");
        }
        assert_eq!(run(5, 11), single[5 * n..16 * n]);
    }
}

#[test]
#[cfg_attr(miri, ignore = "minutes under Miri")]
fn a_group_is_its_members() {
    let (cpu, mut random) = (Cpu::new(3), Random(5));
    let (a, wa) = random.weight(&cpu, DType::Q4_1, 96, 64);
    let (b, wb) = random.weight(&cpu, DType::F16, 33, 64);
    for (m, mode) in [(2, RowsMode::Decode), (40, RowsMode::Prefill)] {
        let x = random.buf(m * 64);
        let (mut ya, mut yb) = (cpu.zeros(m * 96).unwrap(), cpu.zeros(m * 50).unwrap());
        let wide_out = MatMut {
            buf: &mut yb,
            offset: 3,
            rows: m,
            cols: 33,
            stride: 50,
        };
        let last = m * 50 - 17 + 3;
        if last > m * 50 {
            continue;
        }
        let mut outputs = [
            Linear {
                weight: &a,
                bias: None,
                y: MatMut::new(&mut ya, m, 96),
            },
            Linear {
                weight: &b,
                bias: None,
                y: wide_out,
            },
        ];
        cpu.linear_group(Mat::new(&x, m, 64), &mut outputs, mode)
            .unwrap();
        let x = plain::wide(&x.0);
        close(&ya.0, &plain::matmul_nt(&x, &wa, (m, 96, 64)), 1e-5);
        let inner: Vec<f32> = (0..m * 33)
            .map(|i| yb.0[3 + i / 33 * 50 + i % 33])
            .collect();
        close(&inner, &plain::matmul_nt(&x, &wb, (m, 33, 64)), 1e-5);
        assert_eq!(
            (yb.0[0], yb.0[36]),
            (0.0, 0.0),
            "columns beside the output are left alone"
        );
    }
}

#[test]
#[cfg_attr(miri, ignore = "minutes under Miri")]
fn input_gradient_is_the_transposed_product() {
    let mut random = Random(6);
    let cpu = Cpu::new(2);
    for dtype in DType::ALL {
        let (n, k) = (70, 512);
        let (weight, w) = random.weight(&cpu, dtype, n, k);
        for m in [1, 5, 300] {
            let (dy, start) = (random.buf(m * n), random.buf(m * k));
            let transposed = plain::transpose(&w, n, k);
            let mut expected = plain::matmul_nt(&plain::wide(&dy.0), &transposed, (m, k, n));
            let mut dx = start.clone();
            let out = MatMut::new(&mut dx, m, k);
            cpu.linear_dx(Mat::new(&dy, m, n), &weight, out, Acc::Set)
                .unwrap();
            close(&dx.0, &expected, 1e-5);
            let mut dx = start.clone();
            let out = MatMut::new(&mut dx, m, k);
            cpu.linear_dx(Mat::new(&dy, m, n), &weight, out, Acc::Add)
                .unwrap();
            expected
                .iter_mut()
                .zip(&start.0)
                .for_each(|(e, s)| *e += f64::from(*s));
            close(&dx.0, &expected, 1e-5);
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "minutes under Miri")]
fn dense_products_with_strides() {
    let (cpu, mut random) = (Cpu::new(2), Random(7));
    for (m, n, k) in [
        (1, 16, 64),
        (7, 33, 20),
        (16, 40, 16),
        (17, 5, 9),
        (130, 300, 70),
    ] {
        for product in [Product::NN, Product::NT, Product::TN] {
            let (ar, ac) = if product == Product::TN {
                (k, m)
            } else {
                (m, k)
            };
            let (br, bc) = if product == Product::NT {
                (n, k)
            } else {
                (k, n)
            };
            let (a, b) = (random.buf(5 + ar * (ac + 3)), random.buf(br * (bc + 1)));
            let mut c = random.buf(2 + m * (n + 2));
            let start = c.clone();
            let a_mat = Mat {
                buf: &a,
                offset: 5,
                rows: ar,
                cols: ac,
                stride: ac + 3,
            };
            let b_mat = Mat {
                buf: &b,
                offset: 0,
                rows: br,
                cols: bc,
                stride: bc + 1,
            };
            let c_mat = MatMut {
                buf: &mut c,
                offset: 2,
                rows: m,
                cols: n,
                stride: n + 2,
            };
            cpu.matmul(product, 0.5, (a_mat, b_mat), c_mat, Acc::Add)
                .unwrap();
            let at = |i: usize, l: usize| {
                let (r, c) = if product == Product::TN {
                    (l, i)
                } else {
                    (i, l)
                };
                f64::from(a.0[5 + r * (ac + 3) + c])
            };
            let bt = |l: usize, j: usize| {
                let (r, c) = if product == Product::NT {
                    (j, l)
                } else {
                    (l, j)
                };
                f64::from(b.0[r * (bc + 1) + c])
            };
            let mut expected = plain::wide(&start.0);
            for i in 0..m {
                for j in 0..n {
                    let sum: f64 = (0..k).map(|l| at(i, l) * bt(l, j)).sum();
                    expected[2 + i * (n + 2) + j] += 0.5 * sum;
                }
            }
            close(&c.0, &expected, 1e-5);
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "minutes under Miri")]
fn few_rows_of_a_dense_product_do_not_depend_on_each_other() {
    let (cpu, mut random) = (Cpu::new(2), Random(8));
    let (n, k) = (50, 40);
    let (a, b) = (random.buf(16 * k), random.buf(n * k));
    for (product, br, bc) in [(Product::NT, n, k), (Product::NN, k, n)] {
        let run = |m: usize| {
            let mut c = cpu.zeros(m * n).unwrap();
            let operands = (Mat::new(&a, m, k), Mat::new(&b, br, bc));
            cpu.matmul(product, 1.0, operands, MatMut::new(&mut c, m, n), Acc::Set)
                .unwrap();
            c.0
        };
        let all = run(16);
        for m in 1..16 {
            assert_eq!(run(m), all[..m * n]);
        }
    }
}

#[test]
fn wrong_sizes_are_refused_with_their_numbers() {
    let (cpu, mut random) = (Cpu::new(1), Random(9));
    let short = cpu
        .weight(DType::Q4_1, 2, 64, Arc::new(vec![0_u8; 79]))
        .unwrap_err();
    assert_eq!(
        short.to_string(),
        "a Q4_1 matrix of 2 x 64 takes 80 bytes, got 79"
    );
    let odd = cpu
        .weight(DType::Q8_0, 2, 40, Arc::new(Vec::<u8>::new()))
        .unwrap_err();
    assert!(odd.to_string().contains("blocks of 32"), "{odd}");
    let (weight, _) = random.weight(&cpu, DType::F32, 4, 8);
    let (x, mut y) = (CpuBuf(vec![0.0; 16]), CpuBuf(vec![0.0; 7]));
    let out = MatMut::new(&mut y, 2, 4);
    let error = cpu
        .linear(Mat::new(&x, 2, 8), &weight, None, out, RowsMode::Decode)
        .unwrap_err();
    assert_eq!(
        error,
        KernelError::Short {
            op: "linear",
            what: "y",
            needs: 8,
            has: 7
        }
    );
    let out = MatMut::new(&mut y, 1, 4);
    let error = cpu
        .linear(Mat::new(&x, 1, 9), &weight, None, out, RowsMode::Decode)
        .unwrap_err();
    assert!(matches!(
        error,
        KernelError::Shape {
            expected: 8,
            got: 9,
            ..
        }
    ));
}

#[test]
fn misaligned_floats_are_read() {
    let (cpu, mut random) = (Cpu::new(1), Random(10));
    struct Off(Vec<u8>);
    impl AsRef<[u8]> for Off {
        fn as_ref(&self) -> &[u8] {
            // Whatever the allocation's alignment is, one of two neighbours is not a multiple of 4.
            let from = if (self.0.as_ptr() as usize).is_multiple_of(4) {
                1
            } else {
                0
            };
            &self.0[from..from + 32]
        }
    }
    let bytes = random.weight_bytes(DType::F32, 1, 8);
    let mut padded = vec![0_u8; 34];
    let from = if (padded.as_ptr() as usize).is_multiple_of(4) {
        1
    } else {
        0
    };
    padded[from..from + 32].copy_from_slice(&bytes);
    let weight = cpu.weight(DType::F32, 1, 8, Arc::new(Off(padded))).unwrap();
    let mut out = cpu.zeros(8).unwrap();
    cpu.embed(&weight, &[0], &mut out).unwrap();
    close(&out.0, &plain::unpack_row(DType::F32, &bytes, 8), 0.0);
}

/// The path of machines without AVX2, on any machine.
#[test]
fn the_portable_path_agrees() {
    use crate::cpu::few::{Rows, products_portable};
    let (cpu, mut random) = (Cpu::new(1), Random(11));
    for dtype in DType::ALL {
        let (n, k, m) = (many(5, 2), many(512, 256), 3);
        let (weight, w) = random.weight(&cpu, dtype, n, k);
        let x = random.floats(m * k);
        let mut y = vec![0.0; m * n];
        let rows = Rows {
            data: &x,
            stride: k,
            count: m,
            width: k,
        };
        products_portable(&weight, 0..n, rows, |i, j, value| y[i * n + j] = value);
        close(&y, &plain::matmul_nt(&plain::wide(&x), &w, (m, n, k)), 1e-5);
        let mut row = vec![0.0; 64];
        crate::quant::unpack(dtype, weight.row(1), 32, &mut row);
        close(&row, &w[k + 32..k + 96], 1e-6);
    }
}

/// 8-bit weights meet activations rounded to 16 bits: the error is that rounding, and nothing more.
#[test]
#[cfg_attr(miri, ignore = "minutes under Miri")]
fn rounded_activations_stay_within_their_rounding() {
    let mut random = Random(12);
    for threads in [1, 3] {
        let cpu = Cpu::new(threads);
        let (n, k) = (70, 2560);
        let (weight, w) = random.weight(&cpu, DType::Q8_0, n, k);
        for m in [1, 2, 3, 5, 16, 21] {
            let mut x = random.buf(m * k);
            // One number that dwarfs its neighbours, as models have them.
            x.0[7] *= 300.0;
            let mut y = cpu.zeros(m * n).unwrap();
            let out = MatMut::new(&mut y, m, n);
            let mode = RowsMode::Decode;
            cpu.linear(Mat::new(&x, m, k), &weight, None, out, mode)
                .unwrap();
            let exact = plain::matmul_nt(&plain::wide(&x.0), &w, (m, n, k));
            for (at, (y, exact)) in y.0.iter().zip(&exact).enumerate() {
                let (i, j) = (at / n, at % n);
                let (mut rounding, mut size) = (0.0, 0.0);
                for c in 0..k {
                    let group = &x.0[i * k + c / 32 * 32..][..32];
                    let largest = group.iter().fold(0.0_f32, |a, b| a.max(b.abs()));
                    rounding += f64::from(largest) / 65_534.0 * w[j * k + c].abs();
                    size += (f64::from(x.0[i * k + c]) * w[j * k + c]).abs();
                }
                let error = (f64::from(*y) - exact).abs();
                assert!(
                    error <= rounding + 1e-6 * size,
                    "m {m}: {error} > {rounding}"
                );
            }
        }
    }
}
