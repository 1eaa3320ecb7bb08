//! The product's way of a policy against a reading of the policies themselves.

mod cases;
mod random;

use std::time::Instant;

use rand::SeedableRng;
use rand::rngs::StdRng;

use super::model::Model;
use super::oracle;

/// Clusters that every run of the unit tier looks at; more with this variable.
const CLUSTERS: u64 = 10_000;
const MORE: &str = "WEIR_POLICY_CLUSTERS";
/// The first seed, so that one that failed can be run alone.
const SEED: &str = "WEIR_POLICY_SEED";

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

/// One cluster, a few changes, and after each the verdicts of many packets.
fn compare(seed: u64) -> Result<usize, String> {
    let mut rng = StdRng::seed_from_u64(seed);
    let world = random::world(&mut rng);
    let text = |e: anyhow::Error| format!("{e:#}");
    let mut model = Model::new(world).map_err(text)?;
    let mut looked_at = 0;
    let mut changes = Vec::new();
    for step in 0..=random::STEPS {
        for query in random::queries(&mut rng, &model.world) {
            let Ok(meant) = oracle::allows(&model.world, &query) else {
                continue;
            };
            let said = model.allows(&query).map_err(text)?;
            if said != meant {
                let policies: Vec<String> = model
                    .world
                    .policies
                    .values()
                    .map(ToString::to_string)
                    .collect();
                return Err(format!(
                    "step {step}, {query}: the chain says {said}, the policies {meant}\nchanges: {changes:#?}\npolicies:\n{}",
                    policies.join("\n")
                ));
            }
            looked_at += 1;
        }
        if let Some(change) = random::change(&mut rng, &model.world) {
            model.change(&change).map_err(text)?;
            changes.push(change);
        }
    }
    Ok(looked_at)
}

#[test]
fn random_clusters_are_judged_as_their_policies_say() {
    let first = number(SEED);
    let count = number(MORE).unwrap_or(if first.is_some() { 1 } else { CLUSTERS });
    let first = first.unwrap_or(1);
    let workers = std::thread::available_parallelism().map_or(2, usize::from);
    let start = Instant::now();
    let run = |worker: usize| -> Result<usize, String> {
        let mut verdicts = 0;
        for seed in (first..first + count).skip(worker).step_by(workers) {
            let compared = std::panic::catch_unwind(|| compare(seed));
            verdicts += compared
                .unwrap_or_else(|_| Err("panicked".into()))
                .map_err(|why| format!("{SEED}={seed}: {why}"))?;
        }
        Ok(verdicts)
    };
    let results: Vec<Result<usize, String>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..workers).map(|w| scope.spawn(move || run(w))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    let failed: Vec<&String> = results.iter().filter_map(|r| r.as_ref().err()).collect();
    assert!(failed.is_empty(), "{}", failed[0]);
    let verdicts: usize = results.into_iter().flatten().sum();
    let took = start.elapsed();
    println!("{count} clusters, {verdicts} verdicts in {took:?}");
    assert!(verdicts as u64 > count, "hardly anything was compared");
}
