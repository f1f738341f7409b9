//! The head's log-probs forward and backward, and sampling a token.

use std::hint::black_box;

use chela_kernels::{
    DType, HeadGrad, Kernels, Mat, MatMut, PairGrads, Pairs, Result, SamplePolicy, Want,
    sample_row, token_logprob,
};

use crate::measure::{Bench, Work, floats};
use crate::products::weight;
use crate::reference as plain;

/// Numbers of a hidden row.
const WIDTH: usize = 576;

/// The group.
pub(crate) fn head(bench: &Bench) -> Result {
    for dtype in [DType::F32, DType::Q8_0] {
        pairs(bench, dtype)?;
    }
    sampling(bench)
}

fn pairs(bench: &Bench, dtype: DType) -> Result {
    let (cpu, rows, vocab) = (bench.cpu, 128, 16_384);
    let head = weight(cpu, dtype, vocab, WIDTH)?;
    let hidden = cpu.upload(&floats(rows * WIDTH))?;
    let mut dhidden = cpu.zeros(rows * WIDTH)?;
    let ids: Vec<u32> = (0..rows as u32).collect();
    let ones = vec![1.0; rows];
    let asked = Pairs {
        rows: &ids,
        inv_temperature: &ones,
        candidates: &ids,
        k: 1,
    };
    let mat = Mat::new(&hidden, rows, WIDTH);
    let forward = || cpu.head_scores(&head, mat, asked, Want::default());
    let scores = forward()?;
    let work = 2.0 * (rows * vocab * WIDTH) as f64;
    let (px, pw) = (
        plain::wide(&floats(8 * WIDTH)),
        plain::wide(&floats(256 * WIDTH)),
    );
    let mut loops = || {
        let z = plain::matmul_nt(&px, &pw, (8, 256, WIDTH));
        z.chunks(256).for_each(|row| {
            black_box(plain::log_softmax(row));
        });
    };
    bench.run(
        &format!("head_scores {dtype} 128 of 16384"),
        Work::Flops(work),
        || {
            forward().map(|scores| {
                black_box(scores);
            })
        },
        Some((2.0 * (8 * 256 * WIDTH) as f64, &mut loops)),
    )?;
    let backward = || {
        let grads = PairGrads {
            logsumexp: &scores.logsumexp,
            d_logprobs: &ones,
            entropy: None,
        };
        let dhidden = MatMut::new(&mut dhidden, rows, WIDTH);
        let to = HeadGrad {
            dhidden,
            dhead: None,
        };
        cpu.head_backward(&head, mat, asked, grads, to)
    };
    // The logits again, and their derivatives times the head.
    bench.run(
        &format!("head_backward {dtype} 128 of 16384"),
        Work::Flops(2.0 * work),
        backward,
        None,
    )
}

fn sampling(bench: &Bench) -> Result {
    let vocab = 49_152;
    let source: Vec<f32> = (0..vocab)
        .map(|i| ((i * 7919) % 997) as f32 / 80.0)
        .collect();
    let wide = plain::wide(&source);
    let mut logits = source.clone();
    let bytes = 4.0 * vocab as f64;
    let mut loops = || {
        black_box(plain::log_softmax(&wide));
    };
    for (name, top_p) in [("top-p 1", 1.0), ("top-p 0.9", 0.9)] {
        let policy = SamplePolicy {
            top_p,
            temperature: 0.8,
            ..SamplePolicy::default()
        };
        let kernel = || {
            logits.copy_from_slice(&source);
            sample_row(&mut logits, policy, 0.5).map(|sampled| {
                black_box(sampled);
            })
        };
        let name = format!("sample_row 49152, {name}, one thread");
        bench.run(&name, Work::Bytes(bytes), kernel, Some((bytes, &mut loops)))?;
    }
    let kernel = || {
        token_logprob(&source, 7, 1.0).map(|logprob| {
            black_box(logprob);
        })
    };
    let name = "token_logprob 49152, one thread";
    bench.run(name, Work::Bytes(bytes), kernel, Some((bytes, &mut loops)))
}
