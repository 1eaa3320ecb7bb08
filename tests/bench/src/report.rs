//! Figures of a run: medians with their spread, ratios between peers, a table for people and JSON for programs.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context as _, Result};
use serde::Serialize;

/// What a number means, and which way is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum Unit {
    #[serde(rename = "1/s")]
    PerSecond,
    #[serde(rename = "bytes/s")]
    BytesPerSecond,
    #[serde(rename = "s")]
    Seconds,
    #[serde(rename = "bytes")]
    Bytes,
}

impl Unit {
    /// How much better `ours` is than `theirs`: above 1 means better.
    pub fn ratio(self, ours: f64, theirs: f64) -> f64 {
        match self {
            Self::PerSecond | Self::BytesPerSecond => ours / theirs,
            Self::Seconds | Self::Bytes => theirs / ours,
        }
    }

    fn show(self, value: f64) -> String {
        match self {
            Self::PerSecond if value >= 1_000.0 => format!("{:.1} k/s", value / 1e3),
            Self::PerSecond => format!("{value:.0} /s"),
            Self::BytesPerSecond => format!("{:.2} GB/s", value / 1e9),
            Self::Seconds if value < 1e-6 => format!("{:.0} ns", value * 1e9),
            Self::Seconds if value < 1e-3 => format!("{:.1} us", value * 1e6),
            Self::Seconds if value < 1.0 => format!("{:.2} ms", value * 1e3),
            Self::Seconds => format!("{value:.2} s"),
            Self::Bytes => format!("{:.1} MB", value / 1e6),
        }
    }
}

/// One figure of one peer over all rounds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    pub name: String,
    pub unit: Unit,
    /// Median.
    pub value: f64,
    pub min: f64,
    pub max: f64,
    pub runs: usize,
    /// Against each peer: above 1 means that this row is better.
    pub vs: BTreeMap<String, f64>,
}

impl Row {
    /// `None` without samples.
    pub fn new(name: impl Into<String>, unit: Unit, samples: &[f64]) -> Option<Self> {
        Some(Self {
            name: name.into(),
            unit,
            value: median(samples)?,
            min: samples.iter().copied().fold(f64::INFINITY, f64::min),
            max: samples.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            runs: samples.len(),
            vs: BTreeMap::new(),
        })
    }
}

/// A limit that was set for a figure, and whether it held.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Bar {
    pub name: String,
    pub limit: f64,
    pub measured: f64,
    pub held: bool,
}

impl Bar {
    pub fn at_least(name: impl Into<String>, limit: f64, measured: f64) -> Self {
        let name = name.into();
        Self {
            name,
            limit,
            measured,
            held: measured >= limit,
        }
    }

    pub fn at_most(name: impl Into<String>, limit: f64, measured: f64) -> Self {
        let name = name.into();
        Self {
            name,
            limit,
            measured,
            held: measured <= limit,
        }
    }
}

/// What was not measured, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Skipped {
    pub name: String,
    pub reason: String,
}

/// The machine, as far as figures depend on it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Machine {
    kernel: String,
    cpu: String,
    cpus: usize,
    memory_bytes: u64,
    /// Runnable processes per CPU in the minute before the run: noise from others.
    load_before: f64,
}

impl Machine {
    pub fn describe() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let info = read("/proc/cpuinfo");
        let cpu = info
            .lines()
            .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
            .map_or_else(String::new, |(_, name)| name.trim().to_owned());
        let memory = read("/proc/meminfo");
        let kib = memory
            .lines()
            .find_map(|line| {
                line.strip_prefix("MemTotal:")?
                    .split_whitespace()
                    .next()?
                    .parse::<u64>()
                    .ok()
            })
            .unwrap_or(0);
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let load = read("/proc/loadavg");
        let load: f64 = load
            .split_whitespace()
            .next()
            .and_then(|word| word.parse().ok())
            .unwrap_or(0.0);
        Self {
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            cpu,
            cpus,
            memory_bytes: kib * 1024,
            load_before: load / f64::from(u32::try_from(cpus).unwrap_or(1)),
        }
    }
}

/// A whole run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    pub bench: &'static str,
    pub machine: Machine,
    pub rows: Vec<Row>,
    pub bars: Vec<Bar>,
    pub skipped: Vec<Skipped>,
}

impl Report {
    pub fn new(bench: &'static str, machine: Machine) -> Self {
        Self {
            bench,
            machine,
            rows: Vec::new(),
            bars: Vec::new(),
            skipped: Vec::new(),
        }
    }

    /// Writes the JSON form.
    pub fn write(&self, path: &Path) -> Result<()> {
        let mut text = serde_json::to_string_pretty(self).context("encode the report")?;
        text.push('\n');
        std::fs::write(path, text).with_context(|| format!("write {}", path.display()))
    }

    /// The form for people.
    pub fn table(&self) -> String {
        let machine = &self.machine;
        let mut text = format!(
            "{}: {} x {}, kernel {}, load {:.1} per CPU before the run\n\n",
            self.bench, machine.cpus, machine.cpu, machine.kernel, machine.load_before
        );
        let width = self
            .rows
            .iter()
            .map(|row| row.name.len())
            .max()
            .unwrap_or(0);
        for row in &self.rows {
            let ratios: Vec<String> = row
                .vs
                .iter()
                .map(|(peer, ratio)| format!("{ratio:.3} x {peer}"))
                .collect();
            let _infallible = writeln!(
                text,
                "{:<width$}  {:>11}  [{} .. {}] of {}  {}",
                row.name,
                row.unit.show(row.value),
                row.unit.show(row.min),
                row.unit.show(row.max),
                row.runs,
                ratios.join(", ")
            );
        }
        for Skipped { name, reason } in &self.skipped {
            let _infallible = writeln!(text, "{name:<width$}  skipped: {reason}");
        }
        if !self.bars.is_empty() {
            text.push('\n');
        }
        for bar in &self.bars {
            let mark = if bar.held { '✓' } else { '✗' };
            let _infallible = writeln!(
                text,
                " {mark} {}: {:.3} (limit {})",
                bar.name, bar.measured, bar.limit
            );
        }
        text
    }
}

/// The middle sample, or the mean of the middle two.
pub fn median(samples: &[f64]) -> Option<f64> {
    quantile(samples, 0.5)
}

/// Linear between the neighbours; `None` without samples.
pub fn quantile(samples: &[f64], share: f64) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let last = u32::try_from(sorted.len().checked_sub(1)?).ok()?;
    let place = share.clamp(0.0, 1.0) * f64::from(last);
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "between zero and the number of samples"
    )]
    let below = place.floor() as usize;
    let above = (below + 1).min(sorted.len() - 1);
    Some(sorted[below] + (sorted[above] - sorted[below]) * place.fract())
}

/// Median over the rounds of the ratio within each round: what drifts over a run, drifts for both.
pub fn paired_ratio(unit: Unit, ours: &[f64], theirs: &[f64]) -> Option<f64> {
    let ratios: Vec<f64> = ours
        .iter()
        .zip(theirs)
        .map(|(ours, theirs)| unit.ratio(*ours, *theirs))
        .collect();
    median(&ratios)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_or_the_mean_of_the_middle_two() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median(&[]), None);
        assert_eq!(quantile(&[1.0, 2.0, 3.0, 4.0, 5.0], 1.0), Some(5.0));
    }

    #[test]
    fn a_ratio_above_one_is_better_in_every_unit() {
        assert!(Unit::PerSecond.ratio(2.0, 1.0) > 1.0);
        assert!(Unit::Seconds.ratio(1.0, 2.0) > 1.0);
        assert_eq!(
            paired_ratio(Unit::Seconds, &[1.0, 10.0, 1.0], &[2.0, 20.0, 2.0]),
            Some(2.0)
        );
    }
}
