//! Candidate log-probs and their gradient.

use super::{Random, close};
use crate::cpu::{Cpu, CpuBuf};
use crate::dtype::DType;
use crate::ops::{HeadGrad, Kernels, Mat, MatMut, PairGrads, Pairs, Want};
use crate::reference as plain;

const WIDTH: usize = 32;

struct Case {
    rows: Vec<u32>,
    inv_temperature: Vec<f32>,
    candidates: Vec<u32>,
    k: usize,
}

impl Case {
    fn pairs(&self) -> Pairs<'_> {
        Pairs {
            rows: &self.rows,
            inv_temperature: &self.inv_temperature,
            candidates: &self.candidates,
            k: self.k,
        }
    }
}

fn case(random: &mut Random, hidden: usize, vocab: usize, k: usize) -> Case {
    let pairs = hidden + 3;
    Case {
        // Some rows occur several times, in no order.
        rows: (0..pairs).map(|p| ((p * 5) % hidden) as u32).collect(),
        inv_temperature: (0..pairs).map(|p| [1.0, 1.6, 0.7][p % 3]).collect(),
        candidates: (0..pairs * k)
            .map(|_| (random.bits() as usize % vocab) as u32)
            .collect(),
        k,
    }
}

/// Log-softmax of each pair.
fn logps(hidden: &[f64], w: &[f64], case: &Case) -> Vec<Vec<f64>> {
    let (rows, vocab) = (hidden.len() / WIDTH, w.len() / WIDTH);
    let z = plain::matmul_nt(hidden, w, (rows, vocab, WIDTH));
    let scaled = |p: usize| {
        let row = &z[case.rows[p] as usize * vocab..][..vocab];
        row.iter()
            .map(|z| z * f64::from(case.inv_temperature[p]))
            .collect::<Vec<_>>()
    };
    (0..case.rows.len())
        .map(|p| plain::log_softmax(&scaled(p)))
        .collect()
}

#[test]
#[cfg_attr(miri, ignore = "minutes under Miri")]
fn scores_are_the_log_softmax() {
    let mut random = Random(50);
    for (threads, dtype, hidden, vocab) in [
        (1, DType::F32, 3, 50),
        (2, DType::Q4_1, 7, 1000),
        (2, DType::Q8_0, 600, 300),
    ] {
        let cpu = Cpu::new(threads);
        let (head, w) = random.weight(&cpu, dtype, vocab, WIDTH);
        let x = random.buf(hidden * WIDTH);
        let case = case(&mut random, hidden, vocab, 4);
        let want = Want {
            entropy: true,
            top_k: 6,
        };
        let mat = Mat::new(&x, hidden, WIDTH);
        let scores = cpu.head_scores(&head, mat, case.pairs(), want).unwrap();
        let expected = logps(&plain::wide(&x.0), &w, &case);
        let top = scores.top.unwrap();
        let entropies = scores.entropy.unwrap();
        close(
            &entropies,
            &expected
                .iter()
                .map(|l| plain::entropy(l))
                .collect::<Vec<_>>(),
            1e-5,
        );
        for (p, logp) in expected.iter().enumerate() {
            let ids = &case.candidates[p * 4..(p + 1) * 4];
            let named: Vec<f64> = ids.iter().map(|c| logp[*c as usize]).collect();
            close(&scores.logprobs[p * 4..(p + 1) * 4], &named, 1e-5);
            let mut order: Vec<usize> = (0..vocab).collect();
            order.sort_by(|a, b| logp[*b].total_cmp(&logp[*a]));
            let best: Vec<f64> = order[..6].iter().map(|i| logp[*i]).collect();
            close(&top.logprobs[p * 6..(p + 1) * 6], &best, 1e-5);
            for (i, id) in top.ids[p * 6..(p + 1) * 6].iter().enumerate() {
                assert!((logp[*id as usize] - best[i]).abs() < 1e-4);
            }
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "minutes under Miri")]
fn gradient_of_scores_and_entropy() {
    let mut random = Random(51);
    for (dtype, vocab, k, with_entropy) in [
        (DType::F32, 40, 1, false),
        (DType::Q4_1, 300, 3, true),
        (DType::Q8_0, 1100, 2, true),
    ] {
        let cpu = Cpu::new(2);
        let hidden = 3;
        let (head, w) = random.weight(&cpu, dtype, vocab, WIDTH);
        let x: Vec<f32> = random
            .floats(hidden * WIDTH)
            .iter()
            .map(|x| 0.2 * x)
            .collect();
        let x = cpu.upload(&x).unwrap();
        let case = case(&mut random, hidden, vocab, k);
        let count = case.rows.len();
        let d_logprobs = random.floats(count * k);
        let d_entropy = random.floats(count);
        let want = Want {
            entropy: true,
            top_k: 0,
        };
        let mat = Mat::new(&x, hidden, WIDTH);
        let scores = cpu.head_scores(&head, mat, case.pairs(), want).unwrap();
        let entropy = scores.entropy.unwrap();
        let grads = PairGrads {
            logsumexp: &scores.logsumexp,
            d_logprobs: &d_logprobs,
            entropy: with_entropy.then_some((&entropy[..], &d_entropy[..])),
        };
        let mut dx = random.buf(hidden * WIDTH);
        let start = dx.clone();
        let mut dw = random.buf(vocab * WIDTH);
        let dw_start = dw.clone();
        let to = HeadGrad {
            dhidden: MatMut::new(&mut dx, hidden, WIDTH),
            dhead: Some(MatMut::new(&mut dw, vocab, WIDTH)),
        };
        cpu.head_backward(&head, mat, case.pairs(), grads, to)
            .unwrap();
        let mut frozen = start.clone();
        let to = HeadGrad {
            dhidden: MatMut::new(&mut frozen, hidden, WIDTH),
            dhead: None,
        };
        cpu.head_backward(&head, mat, case.pairs(), grads, to)
            .unwrap();
        assert_eq!(frozen.0, dx.0, "a frozen head changes nothing else");
        let loss = |x: &[f64], w: &[f64]| {
            let mut total = 0.0;
            for (p, logp) in logps(x, w, &case).iter().enumerate() {
                for c in p * k..(p + 1) * k {
                    total += f64::from(d_logprobs[c]) * logp[case.candidates[c] as usize];
                }
                if with_entropy {
                    total += f64::from(d_entropy[p]) * plain::entropy(logp);
                }
            }
            total
        };
        let x = plain::wide(&x.0);
        let plus = |mut gradient: Vec<f64>, start: &CpuBuf| {
            let start = start.0.iter().map(|s| f64::from(*s));
            gradient.iter_mut().zip(start).for_each(|(g, s)| *g += s);
            gradient
        };
        let expected = plain::finite_difference(&x, |x| loss(x, &w));
        close(&dx.0, &plus(expected, &start), 1e-4);
        // The matrix's own, by a plain loop; its small case also by differences.
        let dz = |p: usize, logp: &[f64], v: usize| {
            let of = |c: usize| f64::from(d_logprobs[c]);
            let named = (p * k..(p + 1) * k).filter(|c| case.candidates[*c] as usize == v);
            let sum: f64 = (p * k..(p + 1) * k).map(of).sum();
            let mut d = named.map(of).sum::<f64>() - logp[v].exp() * sum;
            if with_entropy {
                let slope = logp[v] + plain::entropy(logp);
                d -= f64::from(d_entropy[p]) * logp[v].exp() * slope;
            }
            d * f64::from(case.inv_temperature[p])
        };
        let mut expected = vec![0.0; vocab * WIDTH];
        for (p, logp) in logps(&x, &w, &case).iter().enumerate() {
            let row = &x[case.rows[p] as usize * WIDTH..][..WIDTH];
            for v in 0..vocab {
                let d = dz(p, logp, v);
                let to = expected[v * WIDTH..][..WIDTH].iter_mut();
                to.zip(row).for_each(|(e, x)| *e += d * x);
            }
        }
        if vocab < 100 {
            let differences = plain::finite_difference(&w, |w| loss(&x, w));
            let gap = differences.iter().zip(&expected);
            assert!(gap.fold(0.0, |most: f64, (a, b)| most.max((a - b).abs())) < 1e-7);
        }
        close(&dw.0, &plus(expected, &dw_start), 1e-4);
    }
}

#[test]
fn the_heads_own_gradient_is_the_same_for_any_number_of_threads() {
    // More rows than a round has and more ids than a section.
    let (rows, vocab) = (700, 1300);
    let of = |threads: usize| {
        let (cpu, mut random) = (Cpu::new(threads), Random(54));
        let (head, _) = random.weight(&cpu, DType::F32, vocab, WIDTH);
        let x = random.buf(rows * WIDTH);
        let case = case(&mut random, rows, vocab, 1);
        let mat = Mat::new(&x, rows, WIDTH);
        let scores = cpu.head_scores(&head, mat, case.pairs(), Want::default());
        let (scores, ones) = (scores.unwrap(), vec![1.0; case.rows.len()]);
        let grads = PairGrads {
            logsumexp: &scores.logsumexp,
            d_logprobs: &ones,
            entropy: None,
        };
        let mut dx = cpu.zeros(rows * WIDTH).unwrap();
        let mut dw = cpu.zeros(vocab * WIDTH).unwrap();
        let to = HeadGrad {
            dhidden: MatMut::new(&mut dx, rows, WIDTH),
            dhead: Some(MatMut::new(&mut dw, vocab, WIDTH)),
        };
        cpu.head_backward(&head, mat, case.pairs(), grads, to)
            .unwrap();
        dw.0
    };
    assert!(of(1) == of(3));
}

#[test]
fn wrong_pairs_are_refused() {
    let (cpu, mut random) = (Cpu::new(1), Random(52));
    let (head, _) = random.weight(&cpu, DType::F32, 10, WIDTH);
    let x = random.buf(2 * WIDTH);
    let score = |rows: &[u32], t: &[f32], candidates: &[u32]| {
        let pairs = Pairs {
            rows,
            inv_temperature: t,
            candidates,
            k: 1,
        };
        cpu.head_scores(&head, Mat::new(&x, 2, WIDTH), pairs, Want::default())
    };
    assert!(score(&[1], &[1.0], &[9]).is_ok());
    assert!(score(&[2], &[1.0], &[9]).is_err());
    assert!(score(&[1], &[1.0], &[10]).is_err());
    assert!(score(&[1], &[0.0], &[9]).is_err());
    assert!(score(&[1], &[f32::NAN], &[9]).is_err());
    assert!(score(&[1], &[1.0], &[9, 9]).is_err());
    assert!(score(&[], &[], &[]).unwrap().logprobs.is_empty());
}

#[test]
fn logits_are_a_linear() {
    let (cpu, mut random) = (Cpu::new(2), Random(53));
    let (head, w) = random.weight(&cpu, DType::Q4_1, 130, WIDTH);
    let x = random.buf(2 * WIDTH);
    let mut z = cpu.zeros(260).unwrap();
    cpu.logits(&head, Mat::new(&x, 2, WIDTH), &mut z).unwrap();
    close(
        &z.0,
        &plain::matmul_nt(&plain::wide(&x.0), &w, (2, 130, WIDTH)),
        1e-5,
    );
}
