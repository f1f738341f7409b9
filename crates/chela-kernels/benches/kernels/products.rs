//! Products with a stored weight for few and many rows, and the thin products of an adapter.

use std::hint::black_box;
use std::sync::Arc;

use chela_kernels::{Acc, Cpu, CpuWeight, DType, Kernels, Mat, MatMut, Product, Result, RowsMode};

use crate::measure::{Bench, Work, floats};
use crate::reference as plain;

/// Rows of a weight that the plain loops read.
const PLAIN_ROWS: usize = 64;

fn bytes(dtype: DType, rows: usize, cols: usize) -> Result<Vec<u8>> {
    let bytes = rows * dtype.row_bytes(cols)?;
    Ok(match dtype {
        DType::F32 => floats(rows * cols)
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect(),
        // Scales of 0x1111 are small ordinary numbers.
        _ => vec![0x11; bytes],
    })
}

/// A weight `[rows, cols]`.
pub(crate) fn weight(cpu: &Cpu, dtype: DType, rows: usize, cols: usize) -> Result<CpuWeight> {
    cpu.weight(dtype, rows, cols, Arc::new(bytes(dtype, rows, cols)?))
}

/// `x [m, k]` by the first [`PLAIN_ROWS`] rows of a weight.
fn plain_rows(dtype: DType, x: &[f32], k: usize) -> Result<()> {
    let rows = bytes(dtype, PLAIN_ROWS, k)?;
    let row = dtype.row_bytes(k)?;
    let w: Vec<f64> = rows
        .chunks(row)
        .flat_map(|row| plain::unpack_row(dtype, row, k))
        .collect();
    black_box(plain::matmul_nt(
        &plain::wide(x),
        &w,
        (x.len() / k, PLAIN_ROWS, k),
    ));
    Ok(())
}

/// Products of 1 and 8 rows: bound by reading the weight, and by multiplying.
pub(crate) fn few_rows(bench: &Bench) -> Result {
    let (cpu, n, k) = (bench.cpu, 3072, 1024);
    for dtype in DType::ALL {
        let w = weight(cpu, dtype, n, k)?;
        for m in [1, 8] {
            let numbers = floats(m * k);
            let x = cpu.upload(&numbers)?;
            let mut y = cpu.zeros(m * n)?;
            let (work, part) = if m == 1 {
                let bytes = (n * dtype.row_bytes(k)?) as f64;
                (Work::Bytes(bytes), bytes * PLAIN_ROWS as f64 / n as f64)
            } else {
                let flops = |rows: usize| 2.0 * (m * rows * k) as f64;
                (Work::Flops(flops(n)), flops(PLAIN_ROWS))
            };
            let name = format!("{dtype} {n} x {k}, {m} rows");
            let kernel = || {
                let y = MatMut::new(&mut y, m, n);
                cpu.linear(Mat::new(&x, m, k), &w, None, y, RowsMode::Decode)
            };
            let mut loops = || {
                let _ = black_box(plain_rows(dtype, &numbers, k));
            };
            bench.run(&name, work, kernel, Some((part, &mut loops)))?;
        }
    }
    Ok(())
}

/// Products of 512 rows, forward and by the input.
pub(crate) fn many_rows(bench: &Bench) -> Result {
    let (cpu, m, n, k) = (bench.cpu, 512, 3072, 1024);
    let x = cpu.upload(&floats(m * k))?;
    for dtype in DType::ALL {
        let w = weight(cpu, dtype, n, k)?;
        let mut y = cpu.zeros(m * n)?;
        let mut dx = cpu.zeros(m * k)?;
        let work = Work::Flops(2.0 * (m * n * k) as f64);
        let few = floats(8 * k);
        let mut loops = || {
            let _ = black_box(plain_rows(dtype, &few, k));
        };
        let part = 2.0 * (8 * PLAIN_ROWS * k) as f64;
        let forward = || {
            let y = MatMut::new(&mut y, m, n);
            cpu.linear(Mat::new(&x, m, k), &w, None, y, RowsMode::Prefill)
        };
        let name = format!("{dtype} {n} x {k}, {m} rows");
        bench.run(&name, work, forward, Some((part, &mut loops)))?;
        let backward = || {
            let dx = MatMut::new(&mut dx, m, k);
            cpu.linear_dx(Mat::new(&y, m, n), &w, dx, Acc::Set)
        };
        let name = format!("{dtype} {n} x {k}, {m} rows, dx");
        bench.run(&name, work, backward, Some((part, &mut loops)))?;
    }
    Ok(())
}

/// The four products of an adapter of rank 16.
pub(crate) fn lora(bench: &Bench) -> Result {
    let (cpu, m, n, k, r) = (bench.cpu, 1024, 1536, 576, 16);
    let x = cpu.upload(&floats(m * k))?;
    let y = cpu.upload(&floats(m * n))?;
    let low = cpu.upload(&floats(m * r))?;
    let a = cpu.upload(&floats(r * k))?;
    let b = cpu.upload(&floats(n * r))?;
    let cases = [
        ("x A'", Product::NT, (&x, m, k), (&a, r, k), (m, r), k),
        (
            "(x A') B'",
            Product::NT,
            (&low, m, r),
            (&b, n, r),
            (m, n),
            r,
        ),
        ("dA", Product::TN, (&low, m, r), (&x, m, k), (r, k), m),
        ("dB", Product::TN, (&y, m, n), (&low, m, r), (n, r), m),
    ];
    for (name, product, left, right, (rows, cols), depth) in cases {
        let mut c = cpu.zeros(rows * cols)?;
        let mat = |(buf, rows, cols)| Mat::new(buf, rows, cols);
        let kernel = || {
            let c = MatMut::new(&mut c, rows, cols);
            cpu.matmul(product, 1.0, (mat(left), mat(right)), c, Acc::Add)
        };
        let (p, q) = (plain::wide(&floats(32 * k)), plain::wide(&floats(r * k)));
        let mut loops = || {
            black_box(plain::matmul_nt(&p, &q, (32, r, k)));
        };
        let work = Work::Flops(2.0 * (rows * cols * depth) as f64);
        let part = 2.0 * (32 * r * k) as f64;
        bench.run(name, work, kernel, Some((part, &mut loops)))?;
    }
    Ok(())
}
