//! Label selectors, node selector terms and their operators.

use serde_json::{Map, Value};

use super::object::Object;

#[derive(Clone, Debug, PartialEq, Eq)]
enum Test {
    In(Vec<String>),
    NotIn(Vec<String>),
    Exists,
    DoesNotExist,
    GreaterThan(i64),
    LessThan(i64),
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Requirement {
    key: String,
    test: Test,
}

/// A conjunction of requirements over labels. Without requirements it matches everything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Selector {
    requirements: Vec<Requirement>,
    nothing: bool,
}

impl Selector {
    /// Matches no object.
    pub(crate) fn nothing() -> Self {
        Self {
            requirements: Vec::new(),
            nothing: true,
        }
    }

    /// A `LabelSelector`. A missing one matches nothing, an empty one everything, one with an operator that is not
    /// known matches nothing: a controller must never act on objects that it cannot tell apart.
    pub(crate) fn from_label_selector(selector: Option<&Value>) -> Self {
        let Some(selector) = selector.filter(|s| s.is_object()) else {
            return Self::nothing();
        };
        let mut out = Self::from_map(selector.fields(&["matchLabels"]));
        out.add_expressions(selector.items(&["matchExpressions"]));
        out
    }

    /// Equality with every entry (`spec.selector` of a Service, `nodeSelector`).
    pub(crate) fn from_map(map: Option<&Map<String, Value>>) -> Self {
        let requirements = map
            .into_iter()
            .flatten()
            .map(|(key, value)| Requirement {
                key: key.clone(),
                test: Test::In(vec![value.as_str().unwrap_or_default().to_owned()]),
            })
            .collect();
        Self {
            requirements,
            nothing: false,
        }
    }

    /// `matchExpressions` of a node selector term, or `matchFields` (whose only key is metadata.name).
    pub(crate) fn from_expressions(expressions: &[Value]) -> Self {
        let mut out = Self::default();
        out.add_expressions(expressions);
        out
    }

    /// No requirement at all: matches everything.
    pub(crate) fn is_empty(&self) -> bool {
        self.requirements.is_empty() && !self.nothing
    }

    /// One more requirement: the label has this value, or (`wanted` is false) has not.
    pub(crate) fn require(&mut self, key: &str, value: &str, wanted: bool) {
        let values = vec![value.to_owned()];
        let test = if wanted {
            Test::In(values)
        } else {
            Test::NotIn(values)
        };
        self.requirements.push(Requirement {
            key: key.to_owned(),
            test,
        });
    }

    fn add_expressions(&mut self, expressions: &[Value]) {
        for expression in expressions {
            let values: Vec<String> = expression
                .items(&["values"])
                .iter()
                .filter_map(|v| v.as_str().map(str::to_owned))
                .collect();
            let number = || values.first().and_then(|v| v.parse().ok());
            let test = match expression.text(&["operator"]) {
                "In" => Some(Test::In(values)),
                "NotIn" => Some(Test::NotIn(values)),
                "Exists" => Some(Test::Exists),
                "DoesNotExist" => Some(Test::DoesNotExist),
                "Gt" => number().map(Test::GreaterThan),
                "Lt" => number().map(Test::LessThan),
                _ => None,
            };
            match test {
                Some(test) => self.requirements.push(Requirement {
                    key: expression.text(&["key"]).to_owned(),
                    test,
                }),
                None => self.nothing = true,
            }
        }
    }

    /// Whether the values that `lookup` gives for label names satisfy every requirement.
    pub(crate) fn matches_by<'a>(&self, lookup: impl Fn(&str) -> Option<&'a str>) -> bool {
        !self.nothing
            && self.requirements.iter().all(|r| {
                let value = lookup(&r.key);
                match &r.test {
                    Test::In(values) => value.is_some_and(|v| values.iter().any(|w| w == v)),
                    Test::NotIn(values) => !value.is_some_and(|v| values.iter().any(|w| w == v)),
                    Test::Exists => value.is_some(),
                    Test::DoesNotExist => value.is_none(),
                    Test::GreaterThan(n) => value
                        .and_then(|v| v.parse::<i64>().ok())
                        .is_some_and(|v| v > *n),
                    Test::LessThan(n) => value
                        .and_then(|v| v.parse::<i64>().ok())
                        .is_some_and(|v| v < *n),
                }
            })
    }

    pub(crate) fn matches(&self, labels: Option<&Map<String, Value>>) -> bool {
        self.matches_by(|key| labels?.get(key)?.as_str())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn matches(selector: &Value, labels: &Value) -> bool {
        Selector::from_label_selector(Some(selector)).matches(labels.as_object())
    }

    #[test]
    fn operators_follow_the_label_selector_rules() {
        let labels = json!({"app": "web", "n": "5"});
        let expression = |operator: &str, key: &str, values: Value| json!({"matchExpressions": [{"key": key, "operator": operator, "values": values}]});
        for (selector, want) in [
            (json!({}), true),
            (json!({"matchLabels": {"app": "web"}}), true),
            (json!({"matchLabels": {"app": "db"}}), false),
            (expression("In", "app", json!(["a", "web"])), true),
            (expression("NotIn", "app", json!(["a"])), true),
            (expression("NotIn", "missing", json!(["a"])), true),
            (expression("Exists", "n", json!([])), true),
            (expression("DoesNotExist", "n", json!([])), false),
            (expression("Gt", "n", json!(["4"])), true),
            (expression("Lt", "n", json!(["5"])), false),
            (expression("Gt", "app", json!(["4"])), false),
            (expression("Sideways", "app", json!(["web"])), false),
        ] {
            assert_eq!(matches(&selector, &labels), want, "{selector}");
        }
        assert!(!Selector::from_label_selector(None).matches(labels.as_object()));
    }
}
