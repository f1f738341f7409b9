//! Attention over segments and over caches, and its gradients.

use super::{Random, close};
use crate::cpu::{Cpu, CpuBuf};
use crate::ops::{AttentionSaved, Heads, Kernels, KvPiece, Qkv, QkvGrad};
use crate::reference as plain;
use crate::segments::Segment;

const HEADS: Heads = Heads {
    q_heads: 6,
    kv_heads: 2,
    head_dim: 8,
    scale: 0.35,
};

/// A trunk of 5, two branches of 3 and 4, a leaf of 2 under the second.
fn tree(window: Option<usize>) -> Vec<Segment> {
    let segments = [
        Segment::causal(0..5),
        Segment::causal(5..8),
        Segment::ancestor(5..8, 0..5, 5),
        Segment::causal(8..12),
        Segment::ancestor(8..12, 0..5, 5),
        Segment::causal(12..14),
        Segment::ancestor(12..14, 8..12, 4),
        Segment::ancestor(12..14, 0..5, 9),
    ];
    segments
        .into_iter()
        .map(|s| s.with_window(window))
        .collect()
}

fn cases() -> Vec<(&'static str, usize, usize, Vec<Segment>)> {
    vec![
        ("one token", 1, 1, vec![Segment::causal(0..1)]),
        ("causal", 200, 200, vec![Segment::causal(0..200)]),
        (
            "ragged",
            90,
            90,
            vec![Segment::causal(0..70), Segment::causal(70..90)],
        ),
        (
            "window",
            150,
            150,
            vec![Segment::causal(0..150).with_window(Some(9))],
        ),
        (
            "chunk",
            10,
            140,
            vec![Segment::chunk(0..10, 0..140).unwrap()],
        ),
        (
            "chunk with window",
            70,
            300,
            vec![
                Segment::chunk(0..70, 0..300)
                    .unwrap()
                    .with_window(Some(100)),
            ],
        ),
        ("tree", 14, 14, tree(None)),
        ("tree with window", 14, 14, tree(Some(6))),
    ]
}

struct Case {
    q: CpuBuf,
    k: CpuBuf,
    v: CpuBuf,
}

fn inputs(random: &mut Random, rows: usize, keys: usize) -> Case {
    let (q, kv) = (
        HEADS.q_heads * HEADS.head_dim,
        HEADS.kv_heads * HEADS.head_dim,
    );
    Case {
        q: random.buf(rows * q),
        k: random.buf(keys * kv),
        v: random.buf(keys * kv),
    }
}

#[test]
#[cfg_attr(miri, ignore = "minutes under Miri")]
fn attention_is_the_dense_softmax() {
    let mut random = Random(40);
    for threads in [1, 2] {
        let cpu = Cpu::new(threads);
        for (name, rows, keys, segments) in cases() {
            println!("{name}");
            let case = inputs(&mut random, rows, keys);
            let mut out = cpu.zeros(case.q.0.len()).unwrap();
            let mut lse = cpu.zeros(rows * HEADS.q_heads).unwrap();
            let qkv = Qkv {
                q: &case.q,
                k: &case.k,
                v: &case.v,
            };
            cpu.attention(qkv, HEADS, &segments, &mut out, &mut lse)
                .unwrap();
            let wide = [&case.q, &case.k, &case.v].map(|b| plain::wide(&b.0));
            let expected = plain::attention((&wide[0], &wide[1], &wide[2]), HEADS, &segments);
            close(&out.0, &expected.0, 1e-5);
            close(&lse.0, &expected.1, 1e-5);
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "minutes under Miri")]
fn gradients_of_attention() {
    let mut random = Random(41);
    let cpu = Cpu::new(2);
    let small = [
        ("causal", 9, 9, vec![Segment::causal(0..9)]),
        (
            "chunk",
            3,
            9,
            vec![Segment::chunk(0..3, 0..9).unwrap().with_window(Some(4))],
        ),
        ("tree", 14, 14, tree(None)),
        ("tree with window", 14, 14, tree(Some(6))),
    ];
    for (name, rows, keys, segments) in small {
        println!("{name}");
        let case = inputs(&mut random, rows, keys);
        let dout = random.buf(case.q.0.len());
        let [dq, dk, dv] = gradients(&cpu, &case, &segments, &dout);
        let wide = [&case.q, &case.k, &case.v].map(|b| plain::wide(&b.0));
        let d = plain::wide(&dout.0);
        let loss = |q: &[f64], k: &[f64], v: &[f64]| {
            let out = plain::attention((q, k, v), HEADS, &segments).0;
            out.iter().zip(&d).map(|(o, d)| o * d).sum::<f64>()
        };
        let [q, k, v] = &wide;
        close(&dq, &plain::finite_difference(q, |q| loss(q, k, v)), 1e-5);
        close(&dk, &plain::finite_difference(k, |k| loss(q, k, v)), 1e-5);
        close(&dv, &plain::finite_difference(v, |v| loss(q, k, v)), 1e-5);
    }
}

fn gradients(cpu: &Cpu, case: &Case, segments: &[Segment], dout: &CpuBuf) -> [Vec<f32>; 3] {
    let rows = case.q.0.len() / (HEADS.q_heads * HEADS.head_dim);
    let mut out = cpu.zeros(case.q.0.len()).unwrap();
    let mut lse = cpu.zeros(rows * HEADS.q_heads).unwrap();
    let qkv = Qkv {
        q: &case.q,
        k: &case.k,
        v: &case.v,
    };
    cpu.attention(qkv, HEADS, segments, &mut out, &mut lse)
        .unwrap();
    let mut dq = cpu.zeros(case.q.0.len()).unwrap();
    let mut dk = cpu.zeros(case.k.0.len()).unwrap();
    let mut dv = cpu.zeros(case.v.0.len()).unwrap();
    let saved = AttentionSaved {
        out: &out,
        lse: &lse,
        dout,
    };
    let grad = QkvGrad {
        dq: &mut dq,
        dk: &mut dk,
        dv: &mut dv,
    };
    cpu.attention_backward(qkv, HEADS, segments, saved, grad)
        .unwrap();
    [dq.0, dk.0, dv.0]
}

/// Blocks are longer than a finite-difference test can afford: a long text against the same text
/// cut into segments (exact in both, computed in different blocks).
#[test]
#[cfg_attr(miri, ignore = "minutes under Miri")]
fn gradients_do_not_depend_on_how_a_text_is_cut() {
    let (cpu, mut random) = (Cpu::new(2), Random(42));
    let rows = 300;
    let case = inputs(&mut random, rows, rows);
    let dout = random.buf(case.q.0.len());
    let whole = gradients(&cpu, &case, &[Segment::causal(0..rows)], &dout);
    let cut = [
        Segment::causal(0..77),
        Segment::ancestor(77..rows, 0..77, 77),
        Segment::causal(77..rows),
    ];
    for (a, b) in whole.iter().zip(&gradients(&cpu, &case, &cut, &dout)) {
        close(a, &plain::wide(b), 1e-5);
    }
    let window = |s: Segment| s.with_window(Some(50));
    let whole = gradients(&cpu, &case, &[window(Segment::causal(0..rows))], &dout);
    let cut: Vec<_> = cut.into_iter().map(window).collect();
    for (a, b) in whole.iter().zip(&gradients(&cpu, &case, &cut, &dout)) {
        close(a, &plain::wide(b), 1e-5);
    }
}

#[test]
#[cfg_attr(miri, ignore = "minutes under Miri")]
fn decoding_over_caches_is_the_last_row_of_attention() {
    let mut random = Random(43);
    let (hq, hk, d) = (HEADS.q_heads, HEADS.kv_heads, HEADS.head_dim);
    for window in [None, Some(7), Some(600)] {
        let cpu = Cpu::new(2);
        let lengths = [1_usize, 30, 700, 1100];
        let caches: Vec<Case> = lengths
            .iter()
            .map(|l| inputs(&mut random, 1, l + 4))
            .collect();
        let q = random.buf(lengths.len() * hq * d);
        // Each cache is read as two pieces, starting at row 2.
        let pieces: Vec<Vec<KvPiece<'_, CpuBuf>>> = caches
            .iter()
            .zip(&lengths)
            .map(|(c, l)| {
                let piece = |at, len| KvPiece {
                    k: &c.k,
                    v: &c.v,
                    at,
                    len,
                };
                vec![piece(2, l / 3), piece(2 + l / 3, l - l / 3)]
            })
            .collect();
        let views: Vec<_> = pieces.iter().map(Vec::as_slice).collect();
        let mut out = random.buf(lengths.len() * hq * d);
        cpu.attention_decode(&q, &views, HEADS, window, &mut out)
            .unwrap();
        for (s, (c, l)) in caches.iter().zip(&lengths).enumerate() {
            let row = s * hq * d..(s + 1) * hq * d;
            let rows = 2 * hk * d..(2 + l) * hk * d;
            let wide = [&q.0[row.clone()], &c.k.0[rows.clone()], &c.v.0[rows]].map(plain::wide);
            let segment = Segment::chunk(0..1, 0..*l).unwrap().with_window(window);
            let expected = plain::attention((&wide[0], &wide[1], &wide[2]), HEADS, &[segment]);
            close(&out.0[row.clone()], &expected.0, 1e-5);
            // Alone, and in one piece, it is the same to the bit.
            let alone = CpuBuf(q.0[row.clone()].to_vec());
            let mut single = cpu.zeros(hq * d).unwrap();
            let one = [KvPiece {
                k: &c.k,
                v: &c.v,
                at: 2,
                len: *l,
            }];
            cpu.attention_decode(&alone, &[&one], HEADS, window, &mut single)
                .unwrap();
            assert_eq!(single.0, out.0[row]);
        }
    }
}

/// Keys and values scattered over pages of `page` rows, which lie anywhere in a pool of several buffers.
struct Paged {
    pool: Vec<(CpuBuf, CpuBuf)>,
    /// Buffer and first row of each page, in the order of the text.
    table: Vec<(usize, usize)>,
}

const BUFFERS: usize = 3;

impl Paged {
    fn new(random: &mut Random, case: &Case, (page, rows): (usize, usize)) -> Self {
        let width = HEADS.kv_heads * HEADS.head_dim;
        let pages = rows.div_ceil(page);
        // Twice as many places as pages; what lies in the others, and behind the last row, must not count.
        let mut places: Vec<(usize, usize)> = (0..BUFFERS)
            .flat_map(|b| (0..(2 * pages).div_ceil(BUFFERS)).map(move |p| (b, p * page)))
            .collect();
        for i in (1..places.len()).rev() {
            places.swap(i, (random.unit() * (i + 1) as f64) as usize);
        }
        let size = (2 * pages).div_ceil(BUFFERS) * page * width;
        let empty = || CpuBuf(vec![f32::NAN; size]);
        let mut pool: Vec<_> = (0..BUFFERS).map(|_| (empty(), empty())).collect();
        for (i, (buffer, row)) in places[..pages].iter().enumerate() {
            let n = page.min(rows - i * page) * width;
            let (from, to) = (i * page * width, row * width);
            pool[*buffer].0.0[to..to + n].copy_from_slice(&case.k.0[from..from + n]);
            pool[*buffer].1.0[to..to + n].copy_from_slice(&case.v.0[from..from + n]);
        }
        places.truncate(pages);
        let table = places;
        Self { pool, table }
    }

    fn pieces(&self, (page, rows): (usize, usize)) -> Vec<KvPiece<'_, CpuBuf>> {
        let pages = self.table.iter().enumerate();
        pages
            .map(|(i, (buffer, at))| KvPiece {
                k: &self.pool[*buffer].0,
                v: &self.pool[*buffer].1,
                at: *at,
                len: page.min(rows - i * page),
            })
            .collect()
    }
}

#[test]
#[cfg_attr(miri, ignore = "minutes under Miri")]
fn any_page_table_gives_what_one_buffer_gives() {
    let mut random = Random(46);
    let cpu = Cpu::new(2);
    let (hq, d) = (HEADS.q_heads, HEADS.head_dim);
    for round in 0..40 {
        let queries = 1 + (random.unit() * 130.0) as usize;
        let rows = queries + (random.unit() * 700.0) as usize;
        let window = [None, Some(1 + (random.unit() * 300.0) as usize)][round % 2];
        let case = inputs(&mut random, queries, rows);
        let segment = Segment::chunk(0..queries, 0..rows)
            .unwrap()
            .with_window(window);
        let run = |pieces: &[KvPiece<'_, CpuBuf>]| {
            let mut out = cpu.zeros(queries * hq * d).unwrap();
            let mut lse = cpu.zeros(queries * hq).unwrap();
            let segments = [segment.clone()];
            cpu.attention_paged((&case.q, pieces), HEADS, &segments, &mut out, &mut lse)
                .unwrap();
            // One new token of this text: the last query alone.
            let last = CpuBuf(case.q.0[(queries - 1) * hq * d..].to_vec());
            let mut one = cpu.zeros(hq * d).unwrap();
            cpu.attention_decode(&last, &[pieces], HEADS, window, &mut one)
                .unwrap();
            (out.0, lse.0, one.0)
        };
        let whole = run(&[KvPiece {
            k: &case.k,
            v: &case.v,
            at: 0,
            len: rows,
        }]);
        let wide = [&case.q, &case.k, &case.v].map(|b| plain::wide(&b.0));
        let expected = plain::attention(
            (&wide[0], &wide[1], &wide[2]),
            HEADS,
            std::slice::from_ref(&segment),
        );
        close(&whole.0, &expected.0, 1e-5);
        for page in [128, 256, 64, 1 + (random.unit() * 200.0) as usize] {
            let paged = Paged::new(&mut random, &case, (page, rows));
            let cut = run(&paged.pieces((page, rows)));
            assert_eq!(cut.2, whole.2, "a decoded token, pages of {page}");
            if page % 128 == 0 {
                assert_eq!(cut, whole, "{queries} of {rows}, window {window:?}");
            }
            close(&cut.0, &expected.0, 1e-5);
            close(&cut.1, &expected.1, 1e-5);
        }
    }
}

#[test]
fn ranges_outside_the_buffers_are_refused() {
    let (cpu, mut random) = (Cpu::new(1), Random(44));
    let case = inputs(&mut random, 4, 4);
    let (mut out, mut lse) = (cpu.zeros(4 * 48).unwrap(), cpu.zeros(24).unwrap());
    let qkv = Qkv {
        q: &case.q,
        k: &case.k,
        v: &case.v,
    };
    let wrong = [Segment::causal(0..5)];
    assert!(
        cpu.attention(qkv, HEADS, &wrong, &mut out, &mut lse)
            .is_err()
    );
    let piece = [KvPiece {
        k: &case.k,
        v: &case.v,
        at: 2,
        len: 3,
    }];
    assert!(
        cpu.attention_decode(&case.q, &[&piece], HEADS, None, &mut out)
            .is_err()
    );
}

/// The path of machines without AVX2 and of heads that are no multiple of 8, on any machine.
#[test]
fn the_portable_decode_agrees() {
    use crate::cpu::attention_decode::{Run, add_values_portable, score_keys_portable};
    let mut random = Random(45);
    for (d, count) in [(64, 9), (12, 3), (80, 5)] {
        let stride = d + 8;
        let (q, rows) = (random.floats(d), random.floats((count - 1) * stride + d));
        let run = Run {
            rows: &rows,
            stride,
            at: 0,
        };
        let (mut scores, mut out) = (vec![0.0; count], random.floats(d));
        let start = out.clone();
        score_keys_portable(&q, run, &mut scores);
        add_values_portable(&scores, run, &mut out);
        let row = |j: usize| plain::wide(&rows[j * stride..j * stride + d]);
        let dot = |j: usize| {
            row(j)
                .iter()
                .zip(&q)
                .map(|(k, q)| k * f64::from(*q))
                .sum::<f64>()
        };
        let expected: Vec<f64> = (0..count).map(dot).collect();
        close(&scores, &expected, 1e-5);
        let value = |i: usize| (0..count).map(|j| expected[j] * row(j)[i]).sum::<f64>();
        let sums: Vec<f64> = (0..d).map(|i| f64::from(start[i]) + value(i)).collect();
        close(&out, &sums, 1e-5);
    }
}
