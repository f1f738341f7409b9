//! A [`Learner`] of sixteen parameters: its gradients, its optimizer and its files are real.

use super::model::{FAKE_PARAMETERS, FAKE_VOCABULARY, FakeModel, hash, hash_step};
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
        let mut learner = FakeLearner {
            model: FakeModel::base(self.vocabulary),
            first: vec![0.0; FAKE_PARAMETERS],
            second: vec![0.0; FAKE_PARAMETERS],
            gradient: vec![0.0; FAKE_PARAMETERS],
            step: 0,
            profile: profile.clone(),
            owner: self.clone(),
            claimed: false,
        };
        if let Some(checkpoint) = from {
            learner.model.parameters = read_parameters(&checkpoint.dir)?;
            let file = checkpoint.dir.join("optimizer.bin");
            let state = read_floats(&file, 2 * FAKE_PARAMETERS + 1)?;
            learner.first = state[..FAKE_PARAMETERS].to_vec();
            learner.second = state[FAKE_PARAMETERS..2 * FAKE_PARAMETERS].to_vec();
            // Steps of the optimizer: several make one version where batches are cut.
            learner.step = state[2 * FAKE_PARAMETERS] as u64;
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
    fn fail(&self) -> Result<(), EngineError> {
        self.owner.lock().errors.pop_front().map_or(Ok(()), Err)
    }

    fn score(&self, sample: &Sample, want: &Want) -> Result<Scored, EngineError> {
        self.takes(sample)?;
        let mut scored = Scored {
            entropy: want.entropy.then(Vec::new),
            top: (want.top_k > 0).then(|| (Vec::new(), Vec::new())),
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
            if let Some((ids, logprobs)) = &mut scored.top {
                let top = self.model.top(&position, want.top_k);
                ids.extend(top.iter().map(|t| t.0));
                logprobs.extend(top.iter().map(|t| t.1));
            }
            prefix = hash_step(prefix, token);
        }
        Ok(scored)
    }

    /// d ln p(t) / d w_j = (1[t % P = j] − mass_j) / T, and d H / d w_j = −Σ over j's tokens of p (ln p + H) / T.
    fn backward(&mut self, sample: &Sample, loss: &TokenLoss) -> Result<(), EngineError> {
        let k = sample.candidates().map_or(1, Candidates::k);
        let rows =
            |column: &Option<Vec<f32>>| column.as_ref().is_none_or(|c| c.len() == sample.len());
        if loss.d_logprobs.len() != sample.len() * k || !rows(&loss.d_entropy) {
            return Err(EngineError::Shape(
                "the loss has another length than the sample".to_owned(),
            ));
        }
        if loss.d_values.is_some() {
            return Err(EngineError::Unsupported("a value head"));
        }
        let mut prefix = hash(&sample.tokens()[..sample.start()]);
        for row in 0..sample.len() {
            let position = self.model.position(prefix, sample.temperature());
            for (token, d) in wanted(sample, row).iter().zip(&loss.d_logprobs[row * k..]) {
                let class = *token as usize % FAKE_PARAMETERS;
                for (j, gradient) in self.gradient.iter_mut().enumerate() {
                    let own = if j == class { 1.0 } else { 0.0 };
                    *gradient += d * (own - position.mass[j]) / sample.temperature();
                }
            }
            if let Some(d_entropy) = &loss.d_entropy {
                let entropy = position.entropy();
                for (j, gradient) in self.gradient.iter_mut().enumerate() {
                    let slope = -position.mass[j] * (position.logprobs[j] + entropy);
                    *gradient += d_entropy[row] * slope / sample.temperature();
                }
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
        let scored = self.forward(batch, want);
        self.model = trained;
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
        let mut gradient = std::mem::replace(&mut self.gradient, vec![0.0; FAKE_PARAMETERS]);
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
        for (j, g) in gradient.iter().enumerate() {
            self.first[j] = params.beta1 * self.first[j] + (1.0 - params.beta1) * g;
            self.second[j] = params.beta2 * self.second[j] + (1.0 - params.beta2) * g * g;
            let first = self.first[j] / (1.0 - params.beta1.powi(t));
            let second = self.second[j] / (1.0 - params.beta2.powi(t));
            let w = &mut self.model.parameters[j];
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
        let mut learner = FakeLearner {
            model: FakeModel::base(50),
            first: vec![0.0; FAKE_PARAMETERS],
            second: vec![0.0; FAKE_PARAMETERS],
            gradient: vec![0.0; FAKE_PARAMETERS],
            step: 0,
            profile: Profile::default(),
            owner: FakeLearners::new(),
            claimed: false,
        };
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
            f64::from(s.logprobs[0] * 2.0 + s.logprobs[1] + 3.0 * s.entropy.unwrap()[1])
        };
        let loss = TokenLoss {
            d_logprobs: vec![2.0, 1.0],
            d_entropy: Some(vec![0.0, 3.0]),
            d_values: None,
        };
        learner.backward(&sample, &loss).unwrap();
        for j in 0..FAKE_PARAMETERS {
            let (before, e) = (learner.model.parameters[j], 1e-2);
            learner.model.parameters[j] = before + e;
            let up = value(&learner);
            learner.model.parameters[j] = before - e;
            let down = value(&learner);
            learner.model.parameters[j] = before;
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
}
