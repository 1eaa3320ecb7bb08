//! Endpoint slices by their own name and by the service that they belong to.

use std::sync::Arc;

use crate::desired::Name;
use crate::name_map::NameMap;
use crate::slice::Slice;
use crate::v1::EndpointSlice;

/// Cheap to copy, as [`NameMap`] is. What belongs to one service is found without looking at any other.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Slices {
    slices: NameMap<Arc<Slice>>,
    /// Names of slices, sorted, by service.
    of_service: NameMap<Box<[Box<str>]>>,
}

impl Slices {
    #[must_use]
    pub fn len(&self) -> usize {
        self.slices.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.slices.is_empty()
    }

    #[must_use]
    pub fn get(&self, name: &Name) -> Option<&Slice> {
        self.slices.get(name).map(Arc::as_ref)
    }

    /// In the order of names.
    pub fn iter(&self) -> impl Iterator<Item = (&Name, &Slice)> {
        self.slices.iter().map(|(name, slice)| (name, &**slice))
    }

    /// Slices of one service, in the order of their names.
    pub fn of<'a>(&'a self, service: &'a Name) -> impl Iterator<Item = &'a Slice> {
        let names = self.of_service.get(service).into_iter().flatten();
        names.filter_map(|name| self.get(&Name::new(&service.namespace, &**name)))
    }

    /// Puts a slice in and returns the one that it replaces.
    pub fn insert(&mut self, name: Name, slice: EndpointSlice) -> Option<Arc<Slice>> {
        let service = Name::new(&name.namespace, &slice.service);
        let own = name.name.clone();
        let before = self.slices.insert(name, Arc::new(Slice::from(slice)));
        if before
            .as_ref()
            .is_some_and(|before| *before.service == *service.name)
        {
            return before;
        }
        if let Some(before) = &before {
            self.forget(&Name::new(&service.namespace, &*before.service), &own);
        }
        let mut names = self.names_of(&service);
        if let Err(place) = names.binary_search_by(|name| (**name).cmp(&own)) {
            names.insert(place, own.into());
            self.of_service.insert(service, names.into());
        }
        before
    }

    pub fn remove(&mut self, name: &Name) -> Option<Arc<Slice>> {
        let before = self.slices.remove(name)?;
        self.forget(&Name::new(&name.namespace, &*before.service), &name.name);
        Some(before)
    }

    fn names_of(&self, service: &Name) -> Vec<Box<str>> {
        self.of_service
            .get(service)
            .map(|names| names.to_vec())
            .unwrap_or_default()
    }

    fn forget(&mut self, service: &Name, slice: &str) {
        let mut names = self.names_of(service);
        names.retain(|name| **name != *slice);
        if names.is_empty() {
            self.of_service.remove(service);
        } else {
            self.of_service.insert(service.clone(), names.into());
        }
    }
}

impl std::ops::Index<&Name> for Slices {
    type Output = Slice;

    fn index(&self, name: &Name) -> &Slice {
        &self.slices[name]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(name: &str, service: &str) -> (Name, EndpointSlice) {
        let slice = EndpointSlice {
            namespace: "d".into(),
            name: name.into(),
            service: service.into(),
            ..EndpointSlice::default()
        };
        (Name::new("d", name), slice)
    }

    fn of(slices: &Slices, service: &str) -> Vec<String> {
        let service = Name::new("d", service);
        let names = slices.of_service.get(&service).into_iter().flatten();
        let names: Vec<String> = names.map(|name| name.to_string()).collect();
        assert_eq!(slices.of(&service).count(), names.len());
        names
    }

    #[test]
    fn a_slice_is_found_by_the_service_that_it_belongs_to_now() {
        let mut slices = Slices::default();
        for (name, service) in [("b", "web"), ("a", "web"), ("c", "db")] {
            let (name, slice) = slice(name, service);
            assert_eq!(slices.insert(name, slice), None);
        }
        assert_eq!(of(&slices, "web"), ["a", "b"]);
        let (name, moved) = slice("b", "db");
        assert_eq!(&*slices.insert(name.clone(), moved).unwrap().service, "web");
        assert_eq!(
            (of(&slices, "web"), of(&slices, "db")),
            (vec!["a".into()], vec!["b".into(), "c".into()])
        );
        slices.remove(&name);
        slices.remove(&Name::new("d", "c"));
        assert!(of(&slices, "db").is_empty());
        assert_eq!(slices.len(), 1);
        // The same service in another namespace is another service.
        assert_eq!(slices.of(&Name::new("e", "web")).count(), 0);
    }
}
