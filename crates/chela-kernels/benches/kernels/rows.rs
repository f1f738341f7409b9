//! What reads and writes rows once: norms, rotation, gated units, the optimizer, experts' routing.

use std::hint::black_box;

use chela_kernels::{
    Acc, Activation, AdamW, GluGrad, Kernels, Norm, NormGrad, Result, Rope, RopeDirection, Routing,
};

use crate::measure::{Bench, Work, floats};
use crate::reference as plain;

/// Tokens.
const ROWS: usize = 1024;
/// Tokens of the plain loops.
const FEW: usize = 16;

/// Bytes of so many numbers, read or written.
fn bytes(numbers: usize) -> f64 {
    4.0 * numbers as f64
}

/// The group.
pub(crate) fn rows(bench: &Bench) -> Result {
    norm(bench)?;
    rope(bench)?;
    glu(bench)?;
    adamw(bench)?;
    route(bench)
}

fn norm(bench: &Bench) -> Result {
    let (cpu, width) = (bench.cpu, 1024);
    let norm = Norm {
        rows: ROWS,
        width,
        eps: 1e-5,
        plus_one: false,
    };
    let n = ROWS * width;
    let (x, w) = (cpu.upload(&floats(n))?, cpu.upload(&floats(width))?);
    let (mut y, mut dx, mut dw) = (cpu.zeros(n)?, cpu.zeros(n)?, cpu.zeros(width)?);
    let (px, pw) = (
        plain::wide(&floats(FEW * width)),
        plain::wide(&floats(width)),
    );
    let mut loops = || {
        black_box(plain::rms_norm(&px, &pw, norm));
    };
    bench.run(
        "rms_norm 1024 x 1024",
        Work::Bytes(bytes(2 * n)),
        || cpu.rms_norm(&x, &w, norm, &mut y),
        Some((bytes(2 * FEW * width), &mut loops)),
    )?;
    let backward = || {
        let grad = NormGrad {
            dx: &mut dx,
            acc: Acc::Set,
            dw: Some(&mut dw),
        };
        cpu.rms_norm_backward(&x, &w, &y, norm, grad)
    };
    bench.run(
        "rms_norm 1024 x 1024, backward",
        Work::Bytes(bytes(3 * n)),
        backward,
        None,
    )
}

fn rope(bench: &Bench) -> Result {
    let (cpu, heads, head_dim) = (bench.cpu, 9, 64);
    let rope = |rows| Rope {
        rows,
        heads,
        head_dim,
        half: head_dim / 2,
    };
    let positions: Vec<u32> = (0..ROWS as u32).collect();
    let inv_freq: Vec<f32> = (0..32).map(|i| 1e4_f32.powf(-i as f32 / 32.0)).collect();
    let n = heads * head_dim;
    let mut x = cpu.upload(&floats(ROWS * n))?;
    let mut table = cpu.zeros(ROWS * head_dim)?;
    let px = plain::wide(&floats(FEW * n));
    let mut loops = || {
        black_box(plain::rope(&px, &positions, &inv_freq, rope(FEW), 1.0));
    };
    cpu.rope_table(&positions, &inv_freq, 1.0, &mut table)?;
    bench.run(
        "rope 1024 x 9 x 64",
        Work::Bytes(bytes(2 * ROWS * n)),
        || cpu.rope(&mut x, &table, rope(ROWS), RopeDirection::Forward),
        Some((bytes(2 * FEW * n), &mut loops)),
    )?;
    bench.run(
        "rope_table 1024 x 32",
        Work::Bytes(bytes(ROWS * head_dim)),
        || cpu.rope_table(&positions, &inv_freq, 1.0, &mut table),
        None,
    )
}

fn glu(bench: &Bench) -> Result {
    let (cpu, n, few) = (bench.cpu, ROWS * 1536, 16 * 1536);
    let (gate, up) = (cpu.upload(&floats(n))?, cpu.upload(&floats(n))?);
    let (mut out, mut dgate, mut dup) = (cpu.zeros(n)?, cpu.zeros(n)?, cpu.zeros(n)?);
    let p = plain::wide(&floats(few));
    for activation in [Activation::Silu, Activation::GeluTanh] {
        let mut loops = || {
            black_box(plain::glu(activation, &p, &p));
        };
        bench.run(
            &format!("glu {activation:?} 1024 x 1536"),
            Work::Bytes(bytes(3 * n)),
            || cpu.glu(activation, n, &gate, &up, &mut out),
            Some((bytes(3 * few), &mut loops)),
        )?;
        let backward = || {
            let grad = GluGrad {
                dout: &out,
                dgate: &mut dgate,
                dup: &mut dup,
            };
            cpu.glu_backward(activation, n, &gate, &up, grad)
        };
        bench.run(
            &format!("glu {activation:?} 1024 x 1536, backward"),
            Work::Bytes(bytes(5 * n)),
            backward,
            None,
        )?;
    }
    Ok(())
}

fn adamw(bench: &Bench) -> Result {
    let (cpu, n, few) = (bench.cpu, 1 << 20, 1 << 14);
    let step = AdamW {
        lr: 1e-5,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.01,
        step: 3,
        grad_scale: 0.5,
    };
    let grad = cpu.upload(&floats(n))?;
    let (mut param, mut first, mut second) = (cpu.zeros(n)?, cpu.zeros(n)?, cpu.zeros(n)?);
    let g = plain::wide(&floats(few));
    let mut loops = || {
        let sum: f64 = g
            .iter()
            .map(|g| plain::adamw((*g, *g, *g, g.abs()), step).0)
            .sum();
        black_box(sum);
    };
    bench.run(
        "adamw 2^20",
        Work::Bytes(bytes(7 * n)),
        || cpu.adamw(&mut param, &grad, &mut first, &mut second, step),
        Some((bytes(7 * few), &mut loops)),
    )?;
    bench.run(
        "sum_squares 2^20",
        Work::Bytes(bytes(n)),
        || {
            cpu.sum_squares(n, &grad).map(|sum| {
                black_box(sum);
            })
        },
        None,
    )
}

fn route(bench: &Bench) -> Result {
    let (cpu, experts) = (bench.cpu, 128);
    let routing = |rows| Routing {
        rows,
        experts,
        active: 8,
        normalised: true,
    };
    let logits = cpu.upload(&floats(ROWS * experts))?;
    let p = plain::wide(&floats(FEW * experts));
    let mut loops = || {
        black_box(plain::route(&p, routing(FEW)));
    };
    bench.run(
        "route 1024 rows, 8 of 128",
        Work::Bytes(bytes(ROWS * experts)),
        || {
            cpu.route(&logits, routing(ROWS)).map(|routes| {
                black_box(routes);
            })
        },
        Some((bytes(FEW * experts), &mut loops)),
    )
}
