//! Labelled parameters: what a row's name is made of, and what plots are drawn over.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde::ser::{Serialize, SerializeMap, Serializer};

/// Parameters of a row, in the order they were given. Shown as `key=value key=value`; in JSON an object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Labels(
    #[cfg_attr(test, schemars(with = "std::collections::BTreeMap<String, String>"))] Vec<(String, String)>,
);

impl Labels {
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a parameter, or changes the one of that name in its place.
    pub fn with(mut self, key: &str, value: impl fmt::Display) -> Self {
        let value = value.to_string();
        match self.0.iter_mut().find(|(have, _)| have == key) {
            Some(label) => label.1 = value,
            None => self.0.push((key.into(), value)),
        }
        self
    }

    /// All but one of them.
    pub fn without(&self, key: &str) -> Self {
        Self(self.0.iter().filter(|(have, _)| have != key).cloned().collect())
    }

    /// The value of a parameter.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.iter().find(|(have, _)| have == key).map(|(_, value)| value.as_str())
    }

    /// Names and values in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value.as_str()))
    }
}

impl fmt::Display for Labels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (key, value)) in self.iter().enumerate() {
            let space = if at == 0 { "" } else { " " };
            write!(f, "{space}{key}={value}")?;
        }
        Ok(())
    }
}

impl Serialize for Labels {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (key, value) in self.iter() {
            map.serialize_entry(key, value)?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for Labels {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct InOrder;
        impl<'de> Visitor<'de> for InOrder {
            type Value = Labels;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of labels")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Labels, A::Error> {
                let mut labels = Labels::new();
                while let Some((key, value)) = map.next_entry::<String, String>()? {
                    labels = labels.with(&key, value);
                }
                Ok(labels)
            }
        }
        deserializer.deserialize_map(InOrder)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_keep_their_order_through_json() {
        let labels = Labels::new().with("ring", "packed").with("batch", 32).with("a", "x y");
        assert_eq!(labels.to_string(), "ring=packed batch=32 a=x y");
        let json = serde_json::to_string(&labels).unwrap();
        assert_eq!(json, r#"{"ring":"packed","batch":"32","a":"x y"}"#);
        assert_eq!(serde_json::from_str::<Labels>(&json).unwrap(), labels);
        assert!(serde_json::from_str::<Labels>("[1]").is_err());
    }

    #[test]
    fn labels_are_changed_in_place_and_taken_out() {
        let labels = Labels::new().with("shadow", "on").with("batch", 1);
        assert_eq!(labels.clone().with("shadow", "off").to_string(), "shadow=off batch=1");
        assert_eq!(labels.without("shadow").to_string(), "batch=1");
        assert_eq!((labels.get("batch"), labels.get("size")), (Some("1"), None));
    }
}
