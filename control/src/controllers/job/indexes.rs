//! Completion indexes: their text form ("0-2,5"), and how a pod carries its index. Pure.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::controllers::runtime::object::{Object, set};

pub(super) const ANNOTATION: &str = "batch.kubernetes.io/job-completion-index";
const VARIABLE: &str = "JOB_COMPLETION_INDEX";
/// No Job has more completions; a text that claims so is not believed.
const INDEX_LIMIT: i64 = 1_000_000;

pub(super) fn of_pod(pod: &Value) -> Option<i64> {
    pod.annotation(ANNOTATION)?
        .parse()
        .ok()
        .filter(|i| (0..INDEX_LIMIT).contains(i))
}

pub(super) fn parse(text: &str) -> BTreeSet<i64> {
    let mut indexes = BTreeSet::new();
    for part in text.split(',').filter(|p| !p.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.parse::<i64>(), last.parse::<i64>()) {
            indexes.extend(first.max(0)..=last.min(INDEX_LIMIT));
        }
    }
    indexes
}

pub(super) fn format(indexes: &BTreeSet<i64>) -> String {
    let mut runs: Vec<(i64, i64)> = Vec::new();
    for index in indexes {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == *index => *last = *index,
            _ => runs.push((*index, *index)),
        }
    }
    let text = |(first, last): &(i64, i64)| match last - first {
        0 => first.to_string(),
        1 => format!("{first},{last}"),
        _ => format!("{first}-{last}"),
    };
    runs.iter().map(text).collect::<Vec<_>>().join(",")
}

/// Gives a pod its index: name, host name, label, annotation and variable.
pub(super) fn dress(pod: &mut Value, job: &str, index: i64) {
    let number = index.to_string();
    set(
        pod,
        &["metadata", "generateName"],
        format!("{job}-{index}-").into(),
    );
    set(
        pod,
        &["metadata", "annotations", ANNOTATION],
        number.clone().into(),
    );
    set(pod, &["metadata", "labels", ANNOTATION], number.into());
    if pod.text(&["spec", "hostname"]).is_empty() {
        set(pod, &["spec", "hostname"], format!("{job}-{index}").into());
    }
    for field in ["containers", "initContainers"] {
        let mut containers = pod.items(&["spec", field]).to_vec();
        for container in &mut containers {
            let mut env = container.items(&["env"]).to_vec();
            if env.iter().any(|e| e.text(&["name"]) == VARIABLE) {
                continue;
            }
            let path = format!("metadata.labels['{ANNOTATION}']");
            env.push(json!({"name": VARIABLE,
                "valueFrom": {"fieldRef": {"fieldPath": path}}}));
            set(container, &["env"], env.into());
        }
        if !containers.is_empty() {
            set(pod, &["spec", field], containers.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn runs_are_written_as_ranges() {
        assert_eq!(format(&BTreeSet::from([0, 1, 2, 4, 5, 9])), "0-2,4,5,9");
        assert_eq!(parse("0-2,4,5,9"), BTreeSet::from([0, 1, 2, 4, 5, 9]));
        assert!(parse("").is_empty() && parse("x,3-a").is_empty());
    }

    proptest! {
        #[test]
        fn the_text_is_read_back(indexes in prop::collection::btree_set(0..200_i64, 0..50)) {
            prop_assert_eq!(parse(&format(&indexes)), indexes);
        }
    }
}
