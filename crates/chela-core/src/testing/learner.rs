//! A [`Learner`] of sixteen parameters, and as many and one for a value head: its gradients, its optimizer and its files are real.

use super::model::{FAKE_PARAMETERS, FAKE_VOCABULARY, FakeModel, Position, hash, hash_step};
use crate::*;
use std::{
    collections::{BTreeSet, VecDeque},
    fs::{self, File},
    io::Write,
    path::Path,
    sync::{Arc, Mutex, MutexGuard},
};

#[derive(Default)]
struct Shared {
    open: BTreeSet<Profile>,
    skips: VecDeque<bool>,
    errors: VecDeque<EngineError>,
    steps: u64,
    drift: f32,
    most_tokens: Option<usize>,
}

/// Opens [`FakeLearner`]s; clones are the same.
#[derive(Clone)]
pub struct FakeLearners {
    vocabulary: usize,
    shared: Arc<Mutex<Shared>>,
}

impl Default for FakeLearners {
    fn default() -> Self {
        Self::with_vocabulary(FAKE_VOCABULARY)
    }
}

impl FakeLearners {
    /// Learners over the fakes' usual vocabulary.
    pub fn new() -> Self {
        Self::default()
    }

    /// Learners that agree with a [`super::FakeEngine`] of this vocabulary.
    pub fn with_vocabulary(vocabulary: usize) -> Self {
        Self {
            vocabulary,
            shared: Arc::default(),
        }
    }

    /// The next optimizer steps, this many, are skipped as not finite.
    pub fn skip_steps(&self, steps: usize) {
        self.lock().skips = VecDeque::from(vec![true; steps]);
    }

    /// As [`FakeLearners::skip_steps`] for one step, after `made` others.
    pub fn skip_a_step_after(&self, made: usize) {
        self.skip_steps(1);
        (0..made).for_each(|_| self.lock().skips.push_front(false));
    }

    /// The next forward pass or optimizer step fails with this; called again, failures queue up.
    pub fn push_error(&self, error: EngineError) {
        self.lock().errors.push_back(error);
    }

    /// Saved parameters differ from the learner's by this much: what an engine then loads is not what was trained.
    pub fn set_drift(&self, drift: f32) {
        self.lock().drift = drift;
    }

    /// Samples of more tokens are refused from now on.
    pub fn set_most_tokens(&self, most: usize) {
        self.lock().most_tokens = Some(most);
    }

    /// Optimizer steps made by all learners, without skipped ones.
    pub fn steps(&self) -> u64 {
        self.lock().steps
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared
            .lock()
            .expect("a test panicked inside a learner")
    }
}

impl Learners for FakeLearners {
    fn open(
        &self,
        profile: &Profile,
        spec: &AdapterSpec,
        from: Option<&Checkpoint>,
    ) -> Result<Box<dyn Learner>, EngineError> {
        if spec.rank == 0 {
            return Err(EngineError::Shape("an adapter of rank 0".to_owned()));
        }
        let mut learner = FakeLearner::fresh(self.clone(), profile.clone(), spec.value_head);
        if let Some(checkpoint) = from {
            learner.read(&checkpoint.dir)?;
        }
        if !self.lock().open.insert(profile.clone()) {
            return Err(EngineError::Shape(format!(
                "a learner of {profile} is open already"
            )));
        }
        learner.claimed = true;
        Ok(Box::new(learner))
    }

    fn kernel_path(&self) -> String {
        "fake".to_owned()
    }
}

/// One adapter and its optimizer.
pub struct FakeLearner {
    model: FakeModel,
    /// v of each class, then b: V = Σ mass · v + b.
    value: Vec<f32>,
    first: Vec<f32>,
    second: Vec<f32>,
    gradient: Vec<f32>,
    step: u64,
    profile: Profile,
    owner: FakeLearners,
    claimed: bool,
}

impl Drop for FakeLearner {
    fn drop(&mut self) {
        if self.claimed
            && let Ok(mut shared) = self.owner.shared.lock()
        {
            shared.open.remove(&self.profile);
        }
    }
}

impl FakeLearner {
    fn fresh(owner: FakeLearners, profile: Profile, value_head: bool) -> Self {
        let value = vec![0.0; if value_head { FAKE_PARAMETERS + 1 } else { 0 }];
        let zeros = || vec![0.0; FAKE_PARAMETERS + value.len()];
        Self {
            model: FakeModel::base(owner.vocabulary),
            first: zeros(),
            second: zeros(),
            gradient: zeros(),
            step: 0,
            profile,
            owner,
            claimed: false,
            value,
        }
    }

    /// What [`Learner::save`] wrote. A value head that begins now begins at zero.
    fn read(&mut self, dir: &Path) -> Result<(), EngineError> {
        self.model.parameters = read_parameters(dir)?;
        let file = dir.join("value_head.bin");
        let has = if file.exists() {
            FAKE_PARAMETERS + 1
        } else {
            0
        };
        if has > 0 && !self.value.is_empty() {
            self.value = read_floats(&file, has)?;
        }
        let n = FAKE_PARAMETERS + has;
        let state = read_floats(&dir.join("optimizer.bin"), 2 * n + 1)?;
        let moments = state.chunks(n);
        for (to, from) in [&mut self.first, &mut self.second].into_iter().zip(moments) {
            to.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
        }
        // Steps of the optimizer: several make one version where batches are cut.
        self.step = state[2 * n] as u64;
        Ok(())
    }

    /// V of a state; `None` without a value head.
    fn worth(&self, position: &Position) -> Option<f32> {
        let (b, v) = self.value.split_last()?;
        let each = position.mass.iter().zip(v);
        Some(each.map(|(m, v)| m * v).sum::<f32>() + b)
    }

    fn fail(&self) -> Result<(), EngineError> {
        self.owner.lock().errors.pop_front().map_or(Ok(()), Err)
    }

    fn score(&self, sample: &Sample, want: &Want) -> Result<Scored, EngineError> {
        self.takes(sample)?;
        let mut scored = Scored {
            entropy: want.entropy.then(Vec::new),
            top: (want.top_k > 0).then(|| (Vec::new(), Vec::new())),
            values: (!self.value.is_empty()).then(Vec::new),
            ..Scored::default()
        };
        let mut prefix = hash(&sample.tokens()[..sample.start()]);
        for row in 0..sample.len() {
            let position = self.model.position(prefix, sample.temperature());
            let token = sample.tokens()[sample.start() + row];
            scored
                .logprobs
                .extend(wanted(sample, row).iter().map(|t| position.logprob(*t)));
            if let Some(entropy) = &mut scored.entropy {
                entropy.push(position.entropy());
            }
            if let Some(values) = &mut scored.values {
                values.extend(self.worth(&position));
            }
            if let Some((ids, logprobs)) = &mut scored.top {
                let top = self.model.top(&position, want.top_k);
                ids.extend(top.iter().map(|t| t.0));
                logprobs.extend(top.iter().map(|t| t.1));
            }
            prefix = hash_step(prefix, token);
        }
        Ok(scored)
    }

    /// d ln p(t) / d w_j = (1[t % P = j] − mass_j) / T, d H / d w_j = −Σ over j's tokens of p (ln p + H) / T, and
    /// d V / d w_j = mass_j (v_j + b − V) / T.
    fn backward(&mut self, sample: &Sample, loss: &TokenLoss) -> Result<(), EngineError> {
        let k = sample.candidates().map_or(1, Candidates::k);
        let rows =
            |column: &Option<Vec<f32>>| column.as_ref().is_none_or(|c| c.len() == sample.len());
        let fits = rows(&loss.d_entropy) && rows(&loss.d_values);
        if loss.d_logprobs.len() != sample.len() * k || !fits {
            return Err(EngineError::Shape(
                "the loss has another length than the sample".to_owned(),
            ));
        }
        if loss.d_values.is_some() && self.value.is_empty() {
            return Err(EngineError::Unsupported("values without a value head"));
        }
        let mut prefix = hash(&sample.tokens()[..sample.start()]);
        for row in 0..sample.len() {
            let position = self.model.position(prefix, sample.temperature());
            for (token, d) in wanted(sample, row).iter().zip(&loss.d_logprobs[row * k..]) {
                let class = *token as usize % FAKE_PARAMETERS;
                for (j, gradient) in self.gradient[..FAKE_PARAMETERS].iter_mut().enumerate() {
                    let own = if j == class { 1.0 } else { 0.0 };
                    *gradient += d * (own - position.mass[j]) / sample.temperature();
                }
            }
            if let Some(d_entropy) = &loss.d_entropy {
                let entropy = position.entropy();
                for (j, gradient) in self.gradient[..FAKE_PARAMETERS].iter_mut().enumerate() {
                    let slope = -position.mass[j] * (position.logprobs[j] + entropy);
                    *gradient += d_entropy[row] * slope / sample.temperature();
                }
            }
            if let (Some(d_values), Some(worth)) = (&loss.d_values, self.worth(&position)) {
                let (d, b) = (d_values[row], self.value[FAKE_PARAMETERS]);
                let (by_w, by_value) = self.gradient.split_at_mut(FAKE_PARAMETERS);
                for (j, mass) in position.mass.iter().enumerate() {
                    by_w[j] += d * mass * (self.value[j] + b - worth) / sample.temperature();
                    by_value[j] += d * mass;
                }
                by_value[FAKE_PARAMETERS] += d;
            }
            prefix = hash_step(prefix, sample.tokens()[sample.start() + row]);
        }
        Ok(())
    }
}

fn wanted(sample: &Sample, row: usize) -> &[TokenId] {
    match sample.candidates() {
        Some(c) => &c.ids()[row * c.k()..(row + 1) * c.k()],
        None => &sample.tokens()[sample.start() + row..=sample.start() + row],
    }
}

impl Learner for FakeLearner {
    fn takes(&self, sample: &Sample) -> Result<(), EngineError> {
        let (prompt, most) = (sample.tokens().len(), self.owner.lock().most_tokens);
        match most {
            Some(context) if prompt > context => {
                Err(EngineError::ContextLength { prompt, context })
            }
            _ => self.model.check(sample.tokens()),
        }
    }

    fn forward(&mut self, batch: &[Sample], want: Want) -> Result<Vec<Scored>, EngineError> {
        self.fail()?;
        batch
            .iter()
            .map(|sample| self.score(sample, &want))
            .collect()
    }

    fn forward_base(&mut self, batch: &[Sample], want: Want) -> Result<Vec<Scored>, EngineError> {
        let base = FakeModel::base(self.owner.vocabulary);
        let trained = std::mem::replace(&mut self.model, base);
        let value = std::mem::take(&mut self.value);
        let scored = self.forward(batch, want);
        (self.model, self.value) = (trained, value);
        scored
    }

    fn forward_backward(
        &mut self,
        batch: &[Sample],
        loss: &mut dyn FnMut(usize, &Sample, &Scored) -> TokenLoss,
    ) -> Result<(), EngineError> {
        self.fail()?;
        let want = Want {
            entropy: true,
            ..Want::default()
        };
        for (index, sample) in batch.iter().enumerate() {
            let scored = self.score(sample, &want)?;
            let derivative = loss(index, sample, &scored);
            self.backward(sample, &derivative)?;
        }
        Ok(())
    }

    fn optim_step(&mut self, params: &OptimParams) -> Result<StepReport, EngineError> {
        self.fail()?;
        let zeros = vec![0.0; self.gradient.len()];
        let mut gradient = std::mem::replace(&mut self.gradient, zeros);
        let grad_norm = gradient.iter().map(|g| g * g).sum::<f32>().sqrt();
        let told = {
            let mut shared = self.owner.lock();
            shared.skips.pop_front().unwrap_or(false)
        };
        if told || !grad_norm.is_finite() {
            return Ok(StepReport {
                grad_norm,
                skipped: true,
                step: self.step,
            });
        }
        if params.clip > 0.0 && grad_norm > params.clip {
            gradient
                .iter_mut()
                .for_each(|g| *g *= params.clip / grad_norm);
        }
        self.step += 1;
        self.owner.lock().steps += 1;
        let t = self.step as i32;
        let parameters = self.model.parameters.iter_mut().chain(&mut self.value);
        for ((j, g), w) in gradient.iter().enumerate().zip(parameters) {
            self.first[j] = params.beta1 * self.first[j] + (1.0 - params.beta1) * g;
            self.second[j] = params.beta2 * self.second[j] + (1.0 - params.beta2) * g * g;
            let first = self.first[j] / (1.0 - params.beta1.powi(t));
            let second = self.second[j] / (1.0 - params.beta2.powi(t));
            *w -= params.lr * (first / (second.sqrt() + params.eps) + params.weight_decay * *w);
        }
        Ok(StepReport {
            grad_norm,
            skipped: false,
            step: self.step,
        })
    }

    fn weights_hash(&self) -> Result<String, EngineError> {
        Ok(self.model.hash())
    }

    fn save(&self, dir: &Path) -> Result<Checkpoint, EngineError> {
        let io = |e: std::io::Error| EngineError::Io(format!("{}: {e}", dir.display()));
        fs::create_dir(dir).map_err(io)?;
        let drift = self.owner.lock().drift;
        let saved: Vec<f32> = self
            .model
            .parameters
            .iter()
            .enumerate()
            .map(|(j, w)| w + drift * j as f32)
            .collect();
        let config = b"{\"peft_type\":\"LORA\"}";
        write(&dir.join("adapter_config.json"), config).map_err(io)?;
        write(&dir.join("adapter_model.safetensors"), &bytes(&saved)).map_err(io)?;
        if !self.value.is_empty() {
            write(&dir.join("value_head.bin"), &bytes(&self.value)).map_err(io)?;
        }
        let moments = self.first.iter().chain(&self.second).copied();
        let state: Vec<f32> = moments.chain([self.step as f32]).collect();
        write(&dir.join("optimizer.bin"), &bytes(&state)).map_err(io)?;
        Ok(Checkpoint {
            dir: dir.to_owned(),
            step: self.step,
        })
    }
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn write(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut file = File::create_new(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

fn read_floats(path: &Path, n: usize) -> Result<Vec<f32>, EngineError> {
    let bytes =
        fs::read(path).map_err(|e| EngineError::Weights(format!("{}: {e}", path.display())))?;
    if bytes.len() != n * 4 {
        let found = bytes.len();
        return Err(EngineError::Weights(format!(
            "{}: {found} bytes",
            path.display()
        )));
    }
    Ok(bytes
        .chunks_exact(4)
        .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect())
}

/// The parameters in a folder that [`FakeLearner`] saved. The file has PEFT's name and this crate's own bytes.
pub(super) fn read_parameters(dir: &Path) -> Result<Vec<f32>, EngineError> {
    read_floats(&dir.join("adapter_model.safetensors"), FAKE_PARAMETERS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{FakeEngine, block_on};

    fn sample() -> Sample {
        let n = 3;
        let columns = SampleColumns {
            mask: vec![true; n],
            behavior_logprobs: vec![-1.0; n],
            advantages: vec![1.0; n],
        };
        let base = PolicyVersion::base(Profile::default());
        Sample::new(vec![1, 2, 30, 41, 52], 2, columns, 1.0, base).unwrap()
    }

    fn learn(learner: &mut dyn Learner) -> f32 {
        let mut sum = 0.0;
        let mut loss = |_: usize, _: &Sample, scored: &Scored| {
            sum = scored.logprobs.iter().sum();
            TokenLoss {
                d_logprobs: vec![-1.0; 3],
                ..TokenLoss::default()
            }
        };
        learner.forward_backward(&[sample()], &mut loss).unwrap();
        sum
    }

    fn open(learners: &FakeLearners, from: Option<&Checkpoint>) -> Box<dyn Learner> {
        learners
            .open(&Profile::default(), &AdapterSpec::default(), from)
            .unwrap()
    }

    #[test]
    fn gradients_are_those_of_finite_differences() {
        let owner = FakeLearners::with_vocabulary(50);
        let mut learner = FakeLearner::fresh(owner, Profile::default(), true);
        for (j, v) in learner.value.iter_mut().enumerate() {
            *v = 0.5 - 0.3 * (j % 4) as f32;
        }
        let columns = SampleColumns {
            mask: vec![true; 2],
            behavior_logprobs: vec![-1.0; 2],
            advantages: vec![1.0; 2],
        };
        let base = PolicyVersion::base(Profile::default());
        let sample = Sample::new(vec![1, 20, 33], 1, columns, 0.7, base).unwrap();
        let value = |model: &FakeLearner| {
            let want = Want {
                entropy: true,
                ..Want::default()
            };
            let s = model.score(&sample, &want).unwrap();
            let values = s.values.unwrap();
            let worth = 0.7 * values[0] - 2.0 * values[1];
            f64::from(s.logprobs[0] * 2.0 + s.logprobs[1] + 3.0 * s.entropy.unwrap()[1] + worth)
        };
        let loss = TokenLoss {
            d_logprobs: vec![2.0, 1.0],
            d_entropy: Some(vec![0.0, 3.0]),
            d_values: Some(vec![0.7, -2.0]),
        };
        learner.backward(&sample, &loss).unwrap();
        for j in 0..learner.gradient.len() {
            let moved = |learner: &mut FakeLearner, by: f32| match j.checked_sub(FAKE_PARAMETERS) {
                None => learner.model.parameters[j] += by,
                Some(v) => learner.value[v] += by,
            };
            let e = 1e-2;
            moved(&mut learner, e);
            let up = value(&learner);
            moved(&mut learner, -2.0 * e);
            let down = value(&learner);
            moved(&mut learner, e);
            let numeric = (up - down) / f64::from(2.0 * e);
            assert!(
                (numeric - f64::from(learner.gradient[j])).abs() < 2e-3,
                "{j}: {numeric}"
            );
        }
    }

    #[test]
    fn it_learns_saves_and_is_what_the_engine_then_scores() {
        let learners = FakeLearners::new();
        let mut learner = open(&learners, None);
        assert!(
            learners
                .open(&Profile::default(), &AdapterSpec::default(), None)
                .is_err()
        );
        let params = OptimParams {
            lr: 0.1,
            ..OptimParams::default()
        };
        let before = learn(&mut *learner);
        learners.skip_steps(1);
        assert!(learner.optim_step(&params).unwrap().skipped);
        assert_eq!(learn(&mut *learner), before);
        assert_eq!(learner.optim_step(&params).unwrap().step, 1);
        assert!(learn(&mut *learner) > before);

        let dir = std::env::temp_dir().join(format!("chela-fake-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        let checkpoint = learner.save(&dir).unwrap();
        assert!(learner.save(&dir).is_err());
        let after = learner.forward(&[sample()], Want::default()).unwrap();
        drop(learner);
        let mut again = open(&learners, Some(&checkpoint));
        assert_eq!(again.forward(&[sample()], Want::default()).unwrap(), after);

        let engine = FakeEngine::new();
        let version = PolicyVersion {
            profile: Profile::default(),
            number: 1,
        };
        block_on(engine.load(version.clone(), Weights::Folder(dir.clone()))).unwrap();
        let prompt = Prompt {
            tokens: sample().tokens().to_vec(),
        };
        let scored = engine.score(PolicyRef::Version(version), prompt, 2, Want::default());
        assert_eq!(block_on(scored).unwrap().logprobs, after[0].logprobs);
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_value_head_learns_is_saved_and_may_be_left_off() {
        let learners = FakeLearners::new();
        let with = AdapterSpec {
            value_head: true,
            ..AdapterSpec::default()
        };
        let opened = |spec: &AdapterSpec, from: Option<&Checkpoint>| {
            learners.open(&Profile::default(), spec, from).unwrap()
        };
        let mut learner = opened(&with, None);
        let values = |learner: &mut dyn Learner| {
            let scored = learner.forward(&[sample()], Want::default()).unwrap();
            scored[0].values.clone()
        };
        assert_eq!(values(&mut *learner), Some(vec![0.0; 3]));
        let mut loss = |_: usize, _: &Sample, scored: &Scored| TokenLoss {
            d_logprobs: vec![0.0; 3],
            d_values: scored
                .values
                .iter()
                .flatten()
                .map(|v| Some(v - 0.8))
                .collect(),
            ..TokenLoss::default()
        };
        let params = OptimParams {
            lr: 0.05,
            ..OptimParams::default()
        };
        for _ in 0..60 {
            learner.forward_backward(&[sample()], &mut loss).unwrap();
            learner.optim_step(&params).unwrap();
        }
        let learnt = values(&mut *learner).unwrap();
        assert!(learnt.iter().all(|v| (v - 0.8).abs() < 0.05), "{learnt:?}");
        let base = learner.forward_base(&[sample()], Want::default()).unwrap();
        assert_eq!(base[0].values, None);
        assert_eq!(
            values(&mut *learner),
            Some(learnt.clone()),
            "it is still there"
        );
        let name = format!("chela-fake-value-{}", std::process::id());
        let dir = std::env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&dir);
        let checkpoint = learner.save(&dir).unwrap();
        let hash = learner.weights_hash().unwrap();
        drop(learner);
        let mut again = opened(&with, Some(&checkpoint));
        assert_eq!(values(&mut *again), Some(learnt));
        assert_eq!(again.optim_step(&params).unwrap().step, 61);
        drop(again);
        let mut without = opened(&AdapterSpec::default(), Some(&checkpoint));
        assert_eq!(values(&mut *without), None);
        assert_eq!(without.weights_hash().unwrap(), hash);
        let mut loss = |_: usize, _: &Sample, _: &Scored| TokenLoss {
            d_logprobs: vec![0.0; 3],
            d_values: Some(vec![1.0; 3]),
            ..TokenLoss::default()
        };
        let refused = without.forward_backward(&[sample()], &mut loss);
        assert!(matches!(refused, Err(EngineError::Unsupported(_))));
        fs::remove_dir_all(dir).unwrap();
    }
}
