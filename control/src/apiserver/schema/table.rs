//! Reads the embedded fact table. The table is part of the program, so a malformed line is a defect of the build and
//! skipped; the tests look at every line.

use std::collections::HashMap;

use super::{Field, Kind, ListType, Package, Schema, Type, TypeId};

pub(super) fn parse(text: &'static str) -> Schema {
    let ids = type_ids(text);
    let mut schema = Schema {
        packages: Vec::new(),
        types: Vec::new(),
        kinds: HashMap::new(),
    };
    let mut fields = Vec::new();
    for line in text.lines().filter(|l| !l.starts_with('#')) {
        let columns: Vec<&'static str> = line.split('\t').collect();
        match columns.as_slice() {
            ["P", prefix, group, version] => {
                close_type(&mut schema, &mut fields);
                schema.packages.push(Package {
                    prefix,
                    group,
                    version,
                });
            }
            ["T", name, flags] => {
                close_type(&mut schema, &mut fields);
                open_type(&mut schema, name, flags);
            }
            [json, number, kind, flags] => {
                let package = schema.packages.len().saturating_sub(1);
                if let Some(field) = parse_field(&ids, package, [json, number, kind, flags]) {
                    fields.push(field);
                }
            }
            _ => {}
        }
    }
    close_type(&mut schema, &mut fields);
    schema
}

type Ids = HashMap<(usize, &'static str), TypeId>;

fn type_ids(text: &'static str) -> Ids {
    let mut ids = HashMap::new();
    let mut packages = 0_usize;
    for line in text.lines() {
        if line.starts_with("P\t") {
            packages += 1;
        } else if let Some(rest) = line.strip_prefix("T\t") {
            let name = rest.split('\t').next().unwrap_or_default();
            let id = TypeId(u16::try_from(ids.len()).unwrap_or(u16::MAX));
            ids.insert((packages.saturating_sub(1), name), id);
        }
    }
    ids
}

fn open_type(schema: &mut Schema, name: &'static str, flags: &str) {
    let id = TypeId(u16::try_from(schema.types.len()).unwrap_or(u16::MAX));
    let package = schema.packages.len().saturating_sub(1);
    let is_kind = flags.contains('K');
    if is_kind && let Some(p) = schema.packages.get(package) {
        schema.kinds.insert((p.group, p.version, name), id);
    }
    let atomic = flags.contains('A');
    schema.types.push(Type {
        id,
        name,
        package,
        is_kind,
        atomic,
        fields: Box::default(),
    });
}

fn close_type(schema: &mut Schema, fields: &mut Vec<Field>) {
    let done = std::mem::take(fields);
    if let Some(last) = schema.types.last_mut()
        && !done.is_empty()
    {
        last.fields = done.into_boxed_slice();
    }
}

fn parse_field(ids: &Ids, package: usize, columns: [&'static str; 4]) -> Option<Field> {
    let [json, number, kind, flags] = columns;
    let mut field = Field {
        json,
        number: number.parse().ok()?,
        kind: parse_kind(ids, package, kind)?,
        pointer: false,
        omit_empty: false,
        required: false,
        list_type: None,
        atomic: false,
        granular: false,
        patch_replace: false,
        patch_merge: false,
        patch_retain_keys: false,
        merge_key: "",
        default: "",
    };
    for flag in flags.split(' ') {
        match flag.split_once('=') {
            Some(("lt", "atomic")) => field.list_type = Some(ListType::Atomic),
            Some(("lt", "set")) => field.list_type = Some(ListType::Set),
            Some(("lt", keys)) => {
                let keys = keys.strip_prefix("map:")?.split(',').collect();
                field.list_type = Some(ListType::Map(keys));
            }
            Some(("mt", kind)) => {
                field.atomic = kind == "atomic";
                field.granular = kind == "granular";
            }
            Some(("ps", strategy)) => {
                field.patch_replace = strategy == "replace";
                field.patch_merge = strategy.split(',').any(|s| s == "merge");
                field.patch_retain_keys = strategy.split(',').any(|s| s == "retainKeys");
            }
            Some(("mk", key)) => field.merge_key = key,
            Some(("d", default)) => field.default = default,
            _ => match flag {
                "p" => field.pointer = true,
                "o" => field.omit_empty = true,
                "r" => field.required = true,
                _ => {}
            },
        }
    }
    Some(field)
}

fn parse_kind(ids: &Ids, package: usize, text: &'static str) -> Option<Kind> {
    if let Some(rest) = text.strip_prefix("[]") {
        return Some(Kind::List(Box::new(parse_kind(ids, package, rest)?)));
    }
    if let Some(rest) = text.strip_prefix("{}") {
        return Some(Kind::Map(Box::new(parse_kind(ids, package, rest)?)));
    }
    if let Some((index, name)) = text.split_once('.') {
        let package = if index.is_empty() {
            package
        } else {
            index.parse().ok()?
        };
        return ids.get(&(package, name)).copied().map(Kind::Object);
    }
    Some(match text {
        "s" => Kind::String,
        "i" => Kind::Int32,
        "l" => Kind::Int64,
        "b" => Kind::Bool,
        "d" => Kind::Double,
        "y" => Kind::Bytes,
        "a" => Kind::Any,
        "T" => Kind::Time,
        "M" => Kind::MicroTime,
        "D" => Kind::Duration,
        "Q" => Kind::Quantity,
        "I" => Kind::IntOrString,
        "R" => Kind::RawExtension,
        "V" => Kind::FieldsV1,
        "J" => Kind::Json,
        "X" => Kind::StringList,
        "B" => Kind::SchemaOrBool,
        "A" => Kind::SchemaOrArray,
        "S" => Kind::SchemaOrStrings,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_of_the_table_is_understood() {
        let text = include_str!("types.tsv");
        let schema = parse(text);
        let lines = |f: &dyn Fn(&str) -> bool| text.lines().filter(|l| f(l)).count();
        assert_eq!(schema.packages.len(), lines(&|l| l.starts_with("P\t")));
        assert_eq!(schema.types.len(), lines(&|l| l.starts_with("T\t")));
        let fields: usize = schema.types.iter().map(|t| t.fields.len()).sum();
        let expected = lines(&|l| {
            !l.starts_with("P\t") && !l.starts_with("T\t") && !l.starts_with('#') && !l.is_empty()
        });
        assert_eq!(fields, expected);
    }
}
